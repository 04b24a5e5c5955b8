"""Record demonstrations of a person who drives the robot with keyboard or gamepad, on a page of the browser.

Example:
  python cli/teleoperate.py robosuite --image_size 128 --max_steps 300
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import (
    CustomConfig,
    modules_with_suites,
    parse_command_line,
    words_for_later_commands,
)
from rlvla.envs.config import EnvConfig, SplitConfig, without_checkpoint
from rlvla.envs.suite_flags import add_suite_flags
from rlvla.envs.workers.config import WorkerConfig
from rlvla.teleoperation.config import TeleoperationConfig
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace
from rlvla.utils.cli.positional import add_positional
from rlvla.utils.terminal import suggest


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_positional(parser, "task_suite_name", "SUITE", "the suite, e.g. robosuite", several=False)
    add_arguments(parser, EnvConfig, "environment", reword=without_checkpoint)
    add_arguments(parser, TeleoperationConfig, "teleoperation")
    add_arguments(parser, SplitConfig, "initial states")
    add_arguments(parser, WorkerConfig, "environment workers")
    add_arguments(parser, CustomConfig, "own code")
    add_suite_flags(parser, reword=without_checkpoint)
    return parser


@command("kept episodes are saved")
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    namespace = parse_command_line(build_parser, argv)
    env = from_namespace(EnvConfig, namespace).with_suite_flags(namespace)
    kinds = (TeleoperationConfig, SplitConfig, WorkerConfig, CustomConfig)
    config, split, workers, custom = (from_namespace(kind, namespace) for kind in kinds)
    with heavy_imports():
        from rlvla.commands.teleoperate import run_teleoperation
    path = run_teleoperation(env, config, split, workers, modules_with_suites(custom))
    if path is not None:
        suggest(f"python cli/check_demos.py {shlex.quote(str(path))}{words_for_later_commands()}")


if __name__ == "__main__":
    main()

"""Build, reset and step each task of a suite; prints a table and writes a contact sheet of the camera images.

The exit status is 0 if all tasks work, 1 if a task fails, 2 for a mistake in the flags.

Example:
  python cli/check_env.py robosuite
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin, program

begin(__name__)

from rlvla.commands.check_env import CheckConfig, run_check
from rlvla.commands.custom_modules import CustomConfig, modules_with_suites, parse_command_line
from rlvla.envs.config import INSTRUCTION_FLAGS, EnvConfig, without_checkpoint
from rlvla.envs.suite_flags import add_suite_flags
from rlvla.envs.workers.config import WorkerConfig
from rlvla.envs.workers.pool import EnvWorkerError
from rlvla.utils.cli.command import command
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace
from rlvla.utils.cli.positional import add_positional
from rlvla.utils.terminal import show


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_positional(parser, "task_suite_name", "SUITE", "the suite, e.g. robosuite", several=False)
    add_arguments(parser, EnvConfig, "environment", without=INSTRUCTION_FLAGS, reword=without_checkpoint)
    add_arguments(parser, CheckConfig, "check")
    add_arguments(parser, WorkerConfig, "environment workers")
    add_arguments(parser, CustomConfig, "own code")
    add_suite_flags(parser, reword=without_checkpoint)
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with status 1 if a task does not work."""
    namespace = parse_command_line(build_parser, argv)
    config, workers, custom = (from_namespace(kind, namespace) for kind in (CheckConfig, WorkerConfig, CustomConfig))
    env = from_namespace(EnvConfig, namespace, INSTRUCTION_FLAGS).with_suite_flags(namespace)
    try:
        checks = run_check(env, config, workers, modules_with_suites(custom))
    except EnvWorkerError as error:
        raise SystemExit(f"{program()}: {error}") from error
    failed = [check.task.name for check in checks if check.problem]
    show(f"pictures: {config.output}")
    if failed:
        raise SystemExit(f"{len(failed)} of {len(checks)} tasks do not work here: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Record demonstrations of a scripted expert or a trained policy as robomimic-style HDF5 with dataset statistics.

Example:
  python cli/collect_demos.py --task_suite_name toy_reach --use_proprio --num_demos 300 --output runs/demos
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
from rlvla.commands.demos.config import CollectConfig
from rlvla.envs.config import EnvConfig, SplitConfig, without_checkpoint
from rlvla.envs.experts import ExpertConfig
from rlvla.envs.suite_flags import add_suite_flags
from rlvla.envs.workers.config import WorkerConfig
from rlvla.models.config import PolicyConfig
from rlvla.teleoperation.config import TeleoperationConfig
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace
from rlvla.utils.files import unused_folder
from rlvla.utils.terminal import suggest

_OWN_NAME = ("pretrain",)  # of `PolicyConfig`: here the flag is --policy
# Of `TeleoperationConfig`: flags of `CollectConfig`, and the clock, which the policy follows in any case.
_OF_RECORDING = ("output", "num_demos", "seed", "clock")


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, EnvConfig, "environment", reword=without_checkpoint)
    add_arguments(parser, CollectConfig, "recording")
    add_arguments(parser, SplitConfig, "initial states")
    add_arguments(parser, ExpertConfig, "expert")
    add_arguments(parser, PolicyConfig, "policy", without=_OWN_NAME, reword=_of_policy)
    add_arguments(parser, TeleoperationConfig, "page of --intervene page", without=_OF_RECORDING)
    add_arguments(parser, WorkerConfig, "environment workers")
    add_arguments(parser, CustomConfig, "own code")
    add_suite_flags(parser, reword=without_checkpoint)
    return parser


def _of_policy(help_text: str) -> str:
    return help_text.replace("checkpoint", "policy")


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    namespace = parse_command_line(build_parser, argv)
    env = from_namespace(EnvConfig, namespace).with_suite_flags(namespace)
    kinds = (CollectConfig, SplitConfig, WorkerConfig, CustomConfig)
    config, split, workers, custom = (from_namespace(kind, namespace) for kind in kinds)
    policy = from_namespace(PolicyConfig, namespace, _OWN_NAME)
    with heavy_imports():
        from rlvla.commands.demos.players import PagePlayer, checked_player
        from rlvla.commands.demos.record import collect_demonstrations
    page = from_namespace(TeleoperationConfig, namespace, _OF_RECORDING)
    player = checked_player(env, config, split, workers, policy, lambda: from_namespace(ExpertConfig, namespace), page)
    if isinstance(player, PagePlayer):
        path = player.record(workers, modules_with_suites(custom))
    else:
        path = collect_demonstrations(player, workers, modules_with_suites(custom))
    if path is None:
        return
    start = "compact" if config.intervene is None else str(config.policy)
    flags = f"--demos {shlex.quote(str(path))} --pretrain {shlex.quote(start)}"
    flags += f" --save_path {unused_folder(Path('runs/sft'))}"
    suggest(f"python cli/train_sft_vla.py {flags}{words_for_later_commands()}")


if __name__ == "__main__":
    main()

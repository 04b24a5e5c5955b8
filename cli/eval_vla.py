"""Evaluate the success rate of a VLA policy, with 95 % intervals, on initial states it has not been trained on.

Example:
  python cli/eval_vla.py --pretrain runs/ppo/policy --report runs/ppo/report
in several suites, with two ranks:
  deepspeed -q --num_accelerators 2 cli/eval_vla.py --pretrain runs/ppo/policy --task_suite_name libero_10 libero_90
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import CustomConfig, parse_command_line
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.suite_flags import add_suite_flags
from rlvla.envs.workers.config import WorkerConfig
from rlvla.evaluation.config import EvalConfig
from rlvla.models.config import PolicyConfig
from rlvla.rewards.config import JudgeConfig
from rlvla.rewards.success_source import SuccessConfig
from rlvla.rollout.config import RolloutConfig
from rlvla.serving.config import RemoteConfig
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace

# Other commands take a single suite; here the flag belongs to `EvalConfig`.
_SEVERAL_SUITES = ("task_suite_name",)


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, PolicyConfig, "policy")
    add_arguments(parser, EnvConfig, "environment", without=_SEVERAL_SUITES)
    add_arguments(parser, SplitConfig, "initial states")
    add_arguments(parser, EvalConfig, "evaluation")
    add_arguments(parser, SuccessConfig, "what counts as success")
    add_arguments(parser, JudgeConfig, "models that tell success")
    add_arguments(parser, WorkerConfig, "environment workers")
    add_arguments(parser, RolloutConfig, "rollout engine")
    add_arguments(parser, RemoteConfig, "remote policy")
    add_arguments(parser, CustomConfig, "own code")
    add_suite_flags(parser)
    return parser


@command(after_interrupt="the same command continues where it stopped")
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    namespace = parse_command_line(build_parser, argv)
    kinds = (PolicyConfig, EnvConfig, SplitConfig, EvalConfig, WorkerConfig, RolloutConfig, CustomConfig)
    kinds += (SuccessConfig, JudgeConfig, RemoteConfig)
    parts = [from_namespace(kind, namespace, _SEVERAL_SUITES if kind is EnvConfig else ()) for kind in kinds]
    parts[1] = parts[1].with_suite_flags(namespace)
    with heavy_imports():
        from rlvla.commands.evaluate import run_eval
    run_eval(*parts)


if __name__ == "__main__":
    main()

"""Success of a VLA policy with 95 % intervals, on initial states it has never been trained on.

Launch: python cli/eval_vla.py --pretrain runs/ppo/policy
or with several ranks: deepspeed --num_accelerators 2 cli/eval_vla.py ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.threads import limit_threads

limit_threads()

from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.trainer.eval_run import run_eval
from rlvla.trainer.setup import PolicyConfig
from rlvla.utils.arguments import Parser, add_arguments, arg, fail, from_namespace
from rlvla.utils.errors import ConfigError, MissingExtraError


@dataclass(frozen=True)
class EvalConfig:
    """How much is played, and where the figures go."""

    eval_episodes: int = arg(100, "episodes per task, each from another initial state", minimum=1)
    sampled: bool = arg(False, "also sample actions, on the same initial states")
    temperature: float = arg(1.0, "sampling temperature (with --sampled)", above=0)
    num_envs: int = arg(4, "environment processes per rank", minimum=1)
    output: str | None = arg(
        None, "JSON file for the figures (default: eval.json in the checkpoint folder)", metavar="FILE"
    )
    seed: int = arg(0, "seed of the episodes", minimum=0)
    local_rank: int = arg(-1, "set by the deepspeed launcher")


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, PolicyConfig, "policy")
    add_arguments(parser, EnvConfig, "environment")
    add_arguments(parser, SplitConfig, "initial states")
    add_arguments(parser, EvalConfig, "evaluation")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = build_parser()
    namespace = parser.parse_args(argv)
    parts = [from_namespace(kind, namespace) for kind in (PolicyConfig, EnvConfig, SplitConfig, EvalConfig)]
    try:
        run_eval(*parts)
    except (ConfigError, MissingExtraError) as error:
        fail(parser.prog, error)


if __name__ == "__main__":
    main()

"""Looks at the batch of an optimizer step that was left out because of NaN or infinity: which row does it, and where.

python cli/replay_batch.py --batch runs/ppo/bad_batches/iteration_000003_actor_1_rank0.pt --pretrain runs/ppo/policy
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.threads import limit_threads

limit_threads()

from rlvla.trainer.replay_batch import ReplayConfig, run_replay
from rlvla.utils.arguments import Parser, add_arguments, fail, from_namespace
from rlvla.utils.commands import command
from rlvla.utils.errors import ConfigError, MissingExtraError


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, ReplayConfig, "what is looked at")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = build_parser()
    namespace = parser.parse_args(argv)
    try:
        run_replay(from_namespace(ReplayConfig, namespace))
    except (ConfigError, MissingExtraError) as error:
        fail(parser.prog, error)


if __name__ == "__main__":
    main()

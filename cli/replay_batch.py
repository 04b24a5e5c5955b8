"""Find the rows of a batch that caused NaN or infinity, for an optimizer step that was skipped.

Example:
  python cli/replay_batch.py --batch runs/ppo/bad_batches/iteration_000003_actor_1_rank0.pt --pretrain runs/ppo/policy
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, arg, from_namespace


@dataclass(frozen=True)
class ReplayConfig:
    """Batch to replay, and its checkpoint."""

    batch: str = arg("runs/ppo/bad_batches/batch.pt", "file below bad_batches/ of a run folder", metavar="FILE")
    pretrain: str = arg(
        "runs/ppo/policy",
        "checkpoint folder of the policy (or critic, or reward model) that the batch is given to",
        metavar="DIR",
    )
    unnorm_key: str | None = arg(None, "entry of the dataset statistics (default: the only one)", metavar="KEY")


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, ReplayConfig, "batch and checkpoint")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    config = from_namespace(ReplayConfig, build_parser().parse_args(argv))
    with heavy_imports():
        from rlvla.commands.replay_batch import run_replay
    run_replay(Path(config.batch), Path(config.pretrain), config.unnorm_key)


if __name__ == "__main__":
    main()

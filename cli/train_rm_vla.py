"""Training of a reward model: success and progress from frames, on recorded successes and failures.

Launch: deepspeed --num_accelerators 2 cli/train_rm_vla.py --demos runs/demos/demos.hdf5 --save_path runs/rm
or without a launcher: python cli/train_rm_vla.py ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.threads import limit_threads

limit_threads()

from cli.train_sft_vla import TinyConfig
from rlvla.trainer.reward_model_trainer import RewardModelConfig
from rlvla.utils.arguments import Parser, add_arguments, arg, fail, from_namespace
from rlvla.utils.commands import command
from rlvla.utils.errors import ConfigError, MissingExtraError
from rlvla.utils.strategy import StrategyConfig


@dataclass(frozen=True)
class RewardRunConfig:
    """What is trained on what."""

    demos: tuple[str, ...] = arg(
        ("runs/demos/demos.hdf5",),
        "one or more files with episodes: of cli/collect_demos.py --keep all, and of training with --dump_rollouts",
        metavar="FILE",
    )
    pretrain: str = arg("tiny", "policy folder to start from, or 'tiny' for a new small model", metavar="DIR")
    save_path: str = arg("runs/rm", "run folder; the result goes to its subfolder reward_model/", metavar="DIR")
    cameras: tuple[str, ...] = arg((), "cameras of the file to use (default: all of them)", metavar="NAME")
    use_proprio: bool = arg(False, "a new tiny model reads proprio, too")
    center_crop: bool | None = arg(None, "a new tiny model crops images to 90 % of their area (default: no)")
    unnorm_key: str | None = arg(None, "entry of the dataset statistics (default: the only one)", metavar="KEY")
    seed: int = arg(0, "seed of weights, batches and the split", minimum=0)


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, RewardRunConfig, "what is trained")
    add_arguments(parser, TinyConfig, "new tiny model")
    add_arguments(parser, RewardModelConfig, "training")
    add_arguments(parser, StrategyConfig, "DeepSpeed")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = build_parser()
    namespace = parser.parse_args(argv)
    parts = [
        from_namespace(kind, namespace) for kind in (RewardRunConfig, TinyConfig, RewardModelConfig, StrategyConfig)
    ]
    from rlvla.trainer.reward_model_run import run_reward_model

    try:
        run_reward_model(*parts)
    except (ConfigError, MissingExtraError) as error:
        fail(parser.prog, error)


if __name__ == "__main__":
    main()

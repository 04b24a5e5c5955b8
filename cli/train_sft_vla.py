"""Supervised fine-tuning of a VLA policy on demonstrations.

Example:
  python cli/train_sft_vla.py --demos runs/demos/demos.hdf5 --pretrain compact --save_path runs/sft
with two ranks:
  deepspeed -q --num_accelerators 2 cli/train_sft_vla.py --demos runs/demos/demos.hdf5 --pretrain compact
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import CustomConfig, parse_command_line
from rlvla.models.config import ActorConfig
from rlvla.trainer.supervised.config import NewModelConfig, SFTConfig, SFTRunConfig, ValidationConfig
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace, unselected_options
from rlvla.utils.deepspeed.config import StrategyConfig


def build_parser(without: Collection[str] = ()) -> Parser:
    """The command line; `without`: flags of the training that a command around it redefines."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, SFTRunConfig, "what is trained")
    add_arguments(parser, NewModelConfig, "new small model")
    add_arguments(parser, SFTConfig, "training", without=without)
    add_arguments(parser, ValidationConfig, "measurements during training")
    add_arguments(parser, ActorConfig, "adapters and memory")
    add_arguments(parser, StrategyConfig, "DeepSpeed")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    namespace = parse_command_line(build_parser, argv)
    kinds = (SFTRunConfig, NewModelConfig, SFTConfig, ActorConfig, StrategyConfig, CustomConfig, ValidationConfig)
    parts = [from_namespace(kind, namespace) for kind in kinds]
    with heavy_imports():
        from rlvla.commands.train_sft import run_sft
    run_sft(*parts, given=namespace.given, unselected=unselected_options(parts[1], namespace))


if __name__ == "__main__":
    main()

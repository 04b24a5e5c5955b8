"""Train a return model, which predicts from frames how an episode will end (for training by advantage).

Example:
  python cli/train_value_vla.py --demos runs/demos runs/own --pretrain compact
with two ranks:
  deepspeed -q --num_accelerators 2 cli/train_value_vla.py --demos runs/demos runs/own --pretrain compact
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
from rlvla.trainer.supervised.config import NewModelConfig, ReturnModelConfig, ReturnRunConfig
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace
from rlvla.utils.deepspeed.config import StrategyConfig


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, ReturnRunConfig, "what is trained")
    add_arguments(parser, NewModelConfig, "new small model")
    add_arguments(parser, ReturnModelConfig, "training")
    add_arguments(parser, StrategyConfig, "DeepSpeed")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    namespace = parse_command_line(build_parser, argv)
    configs = [
        from_namespace(kind, namespace) for kind in (ReturnRunConfig, NewModelConfig, ReturnModelConfig, StrategyConfig)
    ]
    with heavy_imports():
        from rlvla.commands.train_return_model import run_return_model
    run_return_model(*configs, given=namespace.given)


if __name__ == "__main__":
    main()

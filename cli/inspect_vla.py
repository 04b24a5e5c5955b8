"""Describe a checkpoint folder and whether it can be trained, without loading its weights.

Example:
  python cli/inspect_vla.py --pretrain checkpoints/openvla-7b
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

from rlvla.commands.custom_modules import CustomConfig, parse_command_line
from rlvla.models.config import PLATFORM_HELP, VARIANT_HELP
from rlvla.models.vla.choices import MODEL_VARIANTS, PLATFORMS
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, arg, from_namespace


@dataclass(frozen=True)
class InspectConfig:
    """Folder to inspect, and settings missing from its config.json."""

    pretrain: str = arg("runs/sft/policy", "checkpoint folder, or that of a run", metavar="DIR")
    model_variant: str | None = arg(None, VARIANT_HELP, choices=MODEL_VARIANTS)
    platform: str | None = arg(None, PLATFORM_HELP, choices=tuple(PLATFORMS))


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, InspectConfig, "checkpoint")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with status 1 if the folder cannot be trained."""
    config = from_namespace(InspectConfig, parse_command_line(build_parser, argv))
    with heavy_imports():
        from rlvla.commands.run_policies import policy_folder
        from rlvla.models import describe
    folder = policy_folder(config.pretrain)
    described = describe(folder, model_variant=config.model_variant, platform=config.platform)
    print(described)
    if not described.trainable:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

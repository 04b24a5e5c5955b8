"""Convert demonstrations or rollouts between robomimic-style HDF5 and LeRobot folders (reads v2.1, writes v3.0).

Example:
  python cli/convert_demos.py --demos runs/demos/demos.hdf5 --format lerobot-v3.0 --output runs/lerobot
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.convert_demos import ConvertConfig, run_convert
from rlvla.commands.custom_modules import CustomConfig, parse_command_line
from rlvla.utils.cli.command import command
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, ConvertConfig, "datasets")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_convert(from_namespace(ConvertConfig, parse_command_line(build_parser, argv)))


if __name__ == "__main__":
    main()

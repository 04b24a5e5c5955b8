"""Look at recorded episodes: writes a page with frames, actions over time, events and rewards.

Example:
  python cli/view_data.py runs/demos/demos.hdf5
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
from rlvla.commands.demos.view import ViewConfig, run_view
from rlvla.utils.cli.command import command
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace
from rlvla.utils.cli.positional import add_positional


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_positional(parser, "demos", "FILE", "demonstrations or rollouts")
    add_arguments(parser, ViewConfig, "episodes")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_view(from_namespace(ViewConfig, parse_command_line(build_parser, argv)))


if __name__ == "__main__":
    main()

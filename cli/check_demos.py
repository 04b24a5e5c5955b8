"""Check demonstrations before training: lists problems, replays some episodes, and writes a page.

The exit status is 0 if they can be used (warnings are printed), 1 if not, 2 for a mistake in the flags.

Example:
  python cli/check_demos.py runs/demos --output runs/check_demos
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.check_demos import CheckDemosConfig, run_check_demos
from rlvla.commands.custom_modules import CustomConfig, parse_command_line
from rlvla.utils.cli.command import command
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace
from rlvla.utils.cli.positional import add_positional


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_positional(parser, "demos", "PATH", "demonstrations")
    add_arguments(parser, CheckDemosConfig, "demonstrations")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with status 1 if the data cannot be used."""
    namespace = parse_command_line(build_parser, argv)
    check = run_check_demos(from_namespace(CheckDemosConfig, namespace))
    if check.failed:
        raise SystemExit("these demonstrations cannot be used as they are: see the errors above")


if __name__ == "__main__":
    main()

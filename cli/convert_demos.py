"""Convert demonstrations or dumped rollouts between robomimic-style HDF5 and LeRobot folders (v2.1, v3.0)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.trainer.convert_run import ConvertConfig, run_convert
from rlvla.trainer.custom_modules import CustomConfig, parse_command_line
from rlvla.utils.arguments import Parser, add_arguments, fail, from_namespace
from rlvla.utils.commands import command
from rlvla.utils.errors import ConfigError, MissingExtraError


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, ConvertConfig, "data sets")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser, namespace = parse_command_line(build_parser, argv)
    try:
        run_convert(from_namespace(ConvertConfig, namespace))
    except (ConfigError, MissingExtraError) as error:
        fail(parser.prog, error)


if __name__ == "__main__":
    main()

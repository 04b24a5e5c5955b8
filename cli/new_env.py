"""Write a working custom suite: environment, expert, contract tests, and a README of the parts to fill in.

Example:
  python cli/new_env.py my_robot
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.new_env import NewEnvConfig, write_new_env
from rlvla.utils.cli.command import command
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace
from rlvla.utils.cli.positional import add_positional
from rlvla.utils.terminal import show


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_positional(parser, "name", "NAME", "name of the suite, e.g. my_robot", several=False, usage="[--output FOLDER]")
    add_arguments(parser, NewEnvConfig, "new environment")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    config = from_namespace(NewEnvConfig, build_parser().parse_args(argv))
    suite, test, readme = write_new_env(config)
    show(f"{suite}: the environment\n{test}: its tests\n{readme}: what to fill in")
    show(f"next: python -m pytest {shlex.quote(str(test.parent))}")
    show(f"      python cli/check_env.py {config.name} --custom_module {shlex.quote(str(suite))}")


if __name__ == "__main__":
    main()

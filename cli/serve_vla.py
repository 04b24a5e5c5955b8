"""Serve a policy to robots and evaluation harnesses over a WebSocket, with openpi's protocol.

Example:
  python cli/serve_vla.py --pretrain runs/ppo/policy
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
from rlvla.models.config import PolicyConfig
from rlvla.serving.config import ServeConfig
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, PolicyConfig, "policy")
    add_arguments(parser, ServeConfig, "server")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    namespace = parse_command_line(build_parser, argv)
    with heavy_imports():
        from rlvla.commands.serve import run_serve
    run_serve(from_namespace(PolicyConfig, namespace), from_namespace(ServeConfig, namespace))


if __name__ == "__main__":
    main()

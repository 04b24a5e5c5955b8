"""Lists the commands: `python -m cli`, or `rlvla` where they are installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a folder, not as a package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.cli.listing import listing
from rlvla.utils.cli.programs import COMMANDS, as_installed
from rlvla.utils.terminal import put
from rlvla.version import __version__


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser("rlvla", usage="rlvla [--version]", add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="version", version=f"rlvla {__version__}")
    _, words = parser.parse_known_args(argv)
    if words and (name := words[0].replace("-", "_")) in COMMANDS:
        parser.error(f"each command is a program of its own: {as_installed(f'python cli/{name}.py')}")
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    put(listing(Path(__file__).resolve().parent))
    parser.exit()


if __name__ == "__main__":
    main()

"""Completion of flags in a shell; how to turn it on: docs/commands.md."""

from __future__ import annotations

import argparse
import os


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions, and exit; nothing happens if this is an ordinary call."""
    if "_ARGCOMPLETE" not in os.environ:  # set by the shell's function; argcomplete need not be imported otherwise
        return
    import argcomplete

    argcomplete.autocomplete(parser)

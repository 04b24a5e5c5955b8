"""The commands as programs: their names in a checkout (`python cli/NAME.py`) and where they are installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

PREFIX = "rlvla-"  # of the installed programs
_MODULE = "rlvla.cli"
_FILE = re.compile(r"(?:python )?\bcli/(\w+)\.py")


def is_installed() -> bool:
    """Whether this process was started as an installed program (or module) rather than as a file of a checkout."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    called, module = Path(sys.argv[0]).name, getattr(spec, "name", "")
    return called == PREFIX[:-1] or called.startswith(PREFIX) or module.startswith(f"{_MODULE}.")


def as_installed(text: str) -> str:
    """A text in which commands are called as in a checkout, one command per line, as one would type it here."""
    if not is_installed():
        return text
    return "\n".join(_FILE.sub(_module if "deepspeed " in line else _program, line) for line in text.split("\n"))


def typed_command(argv: Sequence[str], ranks: int | None = None) -> list[str]:
    """The words that start a command again.

    Args:
        argv: its command line, beginning with the program.
        ranks: number of ranks that the launcher starts; None: no launcher.
    """
    name, *flags = argv
    launcher = ["python"] if ranks is None else ["deepspeed", "-q", "--num_accelerators", str(ranks)]
    if not is_installed():
        return [*launcher, *argv]
    stem = Path(name).stem.removeprefix(PREFIX)
    if ranks is None:
        return [PREFIX + stem.replace("_", "-"), *flags]
    return [*launcher, "--module", f"{_MODULE}.{stem.replace('-', '_')}", *flags]


def _program(match: re.Match[str]) -> str:
    return PREFIX + match[1].replace("_", "-")


def _module(match: re.Match[str]) -> str:
    return f"--module {_MODULE}.{match[1]}"

"""Where the code that runs comes from."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from rlvla.version import __version__

_ROOT = Path(__file__).resolve().parents[2]


@cache
def source_commit(root: Path = _ROOT) -> str | None:
    """The commit of the checkout in `root`, with "-dirty" if tracked files differ from it; None outside of one.

    An installed package is not in a checkout, even if a folder above it is.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def source_words() -> str:
    """Version and, in a checkout, commit: `rlvla 0.2.0, commit 1e3158d...`."""
    commit = source_commit()
    return f"rlvla {__version__}" + (f", commit {commit}" if commit else "")

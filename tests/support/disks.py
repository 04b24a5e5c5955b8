"""Small file systems that tests fill up."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


class SmallDisk:
    """A folder on a file system of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, left: int = 0) -> None:
        """Leave room for that many bytes."""
        self._filler.write_bytes(bytes(shutil.disk_usage(self.folder).free - left))

    def make_room(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    """Mount one of that size (300k, 4m) for the block; skips the test where that is not possible."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)

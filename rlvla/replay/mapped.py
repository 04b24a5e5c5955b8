"""Rows in memory-mapped files: written once, read through the page cache, and part of saved states where they lie.

A saved state names rows of these files instead of copying them. A row that a saved state may need is therefore not
written again before that state has been given up (`RowAllocator.give_up`).
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvla.replay.sum_tree import Indices

_GROWTH = 1.25  # of a file; the part that has not been written takes no room on the disk


class RowFile:
    """Rows of one shape and dtype in a file.

    Writing does not go through the map, where a full disk would end the process.

    Args:
        path: the file; its rows are kept.
        shape: of a row.
        dtype: of the rows.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: str):
        self.path = path
        self._shape, self._dtype = shape, np.dtype(dtype)
        self.row_bytes = int(np.prod(shape, dtype=np.int64)) * self._dtype.itemsize
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._rows: NDArray[Any] | None = None

    def write(self, rows: Indices, values: NDArray[Any]) -> None:
        """Write values [B, ...] to the rows [B], which are ascending.

        Raises:
            OSError: there is no room.
        """
        runs = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
        for begin, end in zip(runs, [*runs[1:], len(rows)]):
            data = np.ascontiguousarray(values[begin:end]).reshape(-1).view(np.uint8).data
            offset = int(rows[begin]) * self.row_bytes
            while data:
                written = os.pwrite(self._file, data, offset)
                data, offset = data[written:], offset + written

    def read(self, rows: Indices) -> NDArray[Any]:
        """A copy of the rows [...], which have been written."""
        if not rows.size:
            return np.empty((*rows.shape, *self._shape), dtype=self._dtype)
        needed = int(rows.max()) + 1
        if self._rows is None or len(self._rows) < needed:
            self._map(needed)
        assert self._rows is not None
        return self._rows[rows]

    def _map(self, needed: int) -> None:
        count = max(needed, int(os.fstat(self._file).st_size / self.row_bytes * _GROWTH))
        os.ftruncate(self._file, count * self.row_bytes)
        mapped = mmap.mmap(self._file, count * self.row_bytes, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # rows are drawn from everywhere: reading ahead would be for nothing
        self._rows = np.ndarray((count, *self._shape), dtype=self._dtype, buffer=mapped)

    def sync(self) -> None:
        """Flush what was written to disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; it is mapped until the last array that refers to it is gone."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class RowAllocator:
    """Hands out rows of files, lowest first, and takes them back when no saved state needs them any more."""

    def __init__(self) -> None:
        self.extent = 0  # rows ever handed out
        self._free: Indices = np.empty(0, dtype=np.int64)
        self._waiting: list[tuple[int, Indices]] = []  # rows and the newest saved state that may need them

    def take(self, count: int) -> Indices:
        """[count] rows, ascending."""
        missing = max(0, count - len(self._free))
        rows = np.concatenate([self._free[:count], np.arange(self.extent, self.extent + missing)])
        self._free = self._free[count:]
        self.extent += missing
        return rows

    def put_back(self, rows: Indices, needed_by: int = 0) -> None:
        """Rows that are no longer in use; `needed_by` is the number of the newest saved state, 0 if there is none."""
        self._waiting.append((needed_by, rows))
        if not needed_by:
            self.give_up(1)

    def give_up(self, oldest: int) -> None:
        """States before number `oldest` exist no more: what only they needed is free."""
        ready = [rows for state, rows in self._waiting if state < oldest]
        self._waiting = [entry for entry in self._waiting if entry[0] >= oldest]
        self._free = np.sort(np.concatenate([self._free, *ready]))

    def restore(self, used: Indices) -> None:
        """Continue with just these rows in use."""
        self.extent = int(used.max(initial=-1)) + 1
        self._free = np.setdiff1d(np.arange(self.extent), used)
        self._waiting = []

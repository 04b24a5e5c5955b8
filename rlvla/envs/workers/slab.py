"""Shared memory that passes arrays between a pool and a worker without pickling.

The memory is an unlinked file, known to both sides by file descriptor only. It has no name that could be left behind,
and the kernel frees it when the last process using it ends, even after a crash. Commands and answers alternate, so both
directions share the same bytes.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SHARED_MEMORY_FOLDER = Path("/dev/shm")


@dataclass(frozen=True)
class ArrayRef:
    """Location of an array in a slab."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


def create_slab_file() -> int:
    """Create an empty unnamed file, in memory if possible, and return its file descriptor."""
    folder = _SHARED_MEMORY_FOLDER if os.access(_SHARED_MEMORY_FOLDER, os.W_OK) else None
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


class Slab:
    """One side's view of the shared memory. It grows as needed and never shrinks.

    It is read and written like a file, not mapped: without space left, writing to a mapping would kill the process
    (SIGBUS).

    Args:
        fd: descriptor from `create_slab_file`, created by either side; the slab takes ownership.
    """

    def __init__(self, fd: int):
        self._fd = fd
        self._end = 0

    def rewind(self) -> None:
        """Reset the write position; appended arrays overwrite earlier ones."""
        self._end = 0

    def append(self, array: np.ndarray) -> ArrayRef:
        """Copy an array into the slab after those appended since the last `rewind`.

        Raises:
            OSError: not enough shared memory.
            ValueError: an array of Python objects.
        """
        if array.dtype.hasobject:
            raise ValueError(f"an array of Python objects (dtype {array.dtype}) cannot be shared")
        reference = ArrayRef(self._end, array.shape, array.dtype.str)
        data = _bytes_of(np.ascontiguousarray(array))
        self._end += len(data)
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], reference.offset + written)
        return reference

    def read(self, reference: ArrayRef) -> np.ndarray:
        """Return a copy of the array; ValueError if it is not completely in the file."""
        array = np.empty(reference.shape, dtype=reference.dtype)
        data = _bytes_of(array)
        done = 0
        while done < len(data):
            count = os.preadv(self._fd, [data[done:]], reference.offset + done)
            if not count:
                raise ValueError(f"{reference} reaches outside the shared memory")
            done += count
        return array

    def close(self) -> None:
        """Release the memory. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")

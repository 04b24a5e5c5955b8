"""Shared memory that passes arrays between a pool and a worker without pickling.

The memory is an unlinked file, known to both sides by file descriptor only. It has no name that could be left behind,
and the kernel frees it when the last process using it ends, even after a crash. Commands and answers alternate, so both
directions share the same bytes.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# One cache line: misaligned arrays are slower to copy.
_ALIGNMENT = 64
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

    Args:
        fd: descriptor from `create_slab_file`, created by either side; the slab takes ownership.
    """

    def __init__(self, fd: int):
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self._mapped = 0
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
        self._end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._reserve(self._end)
        self._view(reference)[...] = array
        return reference

    def read(self, reference: ArrayRef) -> np.ndarray:
        """Return a copy of the array.

        Raises:
            ValueError: the reference is outside the file or not to a numeric array.
        """
        if np.dtype(reference.dtype).hasobject or any(size < 0 for size in reference.shape):
            raise ValueError(f"{reference} is no array that can be shared")
        end = reference.offset + _num_bytes(reference)
        if end > self._mapped:  # the other side may have grown the file
            self._map(os.fstat(self._fd).st_size)
        if reference.offset < 0 or end > self._mapped:
            raise ValueError(f"{reference} reaches outside the {self._mapped} bytes of shared memory")
        return self._view(reference).copy()

    def close(self) -> None:
        """Release the memory. Safe to call twice."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _view(self, reference: ArrayRef) -> np.ndarray:
        if _num_bytes(reference) == 0:  # numpy rejects an offset at the end of the buffer
            return np.empty(reference.shape, dtype=reference.dtype)
        assert self._memory is not None
        return np.ndarray(reference.shape, dtype=reference.dtype, buffer=self._memory, offset=reference.offset)

    def _reserve(self, size: int) -> None:
        if size <= self._mapped:
            return
        if size > os.fstat(self._fd).st_size:
            # Allocate now: running out of memory later would be a SIGBUS on the first write.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, size)
            else:
                os.ftruncate(self._fd, size)
        self._map(os.fstat(self._fd).st_size)

    def _map(self, size: int) -> None:
        if size > self._mapped:
            # The old mapping is released with the last array that references it.
            self._memory = mmap.mmap(self._fd, size)
            self._mapped = size


def _num_bytes(reference: ArrayRef) -> int:
    return math.prod(reference.shape) * np.dtype(reference.dtype).itemsize

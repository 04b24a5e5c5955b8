"""Storage of the images of a dataset: memory, or a memory-mapped file if they do not fit."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from rlvla.data.validation import refuse
from rlvla.utils.budgets import available_bytes, gib

_IN_MEMORY = 0.8  # share of the available memory that images may take; the rest is for the model and its training
_READ_AHEAD = 128 * 2**10  # bytes per request; Linux cuts larger ones to the read-ahead of the disk
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mounts")


def empty_images(lengths: Sequence[int], shape: tuple[int, ...], where: str | Path) -> list[np.ndarray]:
    """Per episode an array [S, *shape] uint8 to read its images into, a view of one `image_array` for all of them.

    `shape` is [N, H, W, 3] of one observation, `where` the dataset. Separate arrays would fragment the heap once they
    are joined: twice the memory, and slow allocations in training.
    """
    return np.split(image_array((sum(lengths), *shape), where), np.cumsum(lengths)[:-1])


def image_array(shape: tuple[int, ...], where: str | Path = "--demos") -> np.ndarray:
    """Uninitialized array uint8: in memory if it fits, else in a memory-mapped file without a name.

    The file's space is reserved here; the system frees it with the last reference to the array, at the latest when the
    process ends, however it ends.

    Args:
        shape: of the array.
        where: the dataset, for messages.

    Raises:
        DataError: neither memory nor a disk has room for it.
    """
    size, available = int(np.prod(shape, dtype=object)), available_bytes()
    if size <= _IN_MEMORY * available:
        return np.empty(shape, np.uint8)
    full = []
    for folder in dict.fromkeys((tempfile.gettempdir(), "/var/tmp")):
        free = 0 if _in_memory(folder) else _free_bytes(folder)
        if size <= free:
            with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # writing to a mapping without space kills the process
                return np.ndarray(shape, np.uint8, buffer=mmap.mmap(file.fileno(), size))
        full.append(f"{folder} {gib(free)}")
    text = (
        f"the images take {gib(size)}, of {gib(available)} of memory available, and no temporary folder has room for "
        f"them (free on disk: {', '.join(full)}); set TMPDIR to a folder on a larger disk, or read fewer cameras or "
        "smaller images (--image_size)"
    )
    refuse(where, [text])
    raise AssertionError("refused")


def _free_bytes(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _in_memory(folder: str) -> bool:
    """Whether the file system of a folder keeps its files in memory."""
    kinds = {}
    with suppress(OSError):
        kinds = {line.split()[1]: line.split()[2] for line in _MOUNTS.read_text().splitlines()}
    mounts = [str(place) for place in (Path(folder).resolve(), *Path(folder).resolve().parents) if str(place) in kinds]
    return bool(mounts) and kinds[mounts[0]] in _MEMORY_FILE_SYSTEMS


def mapping_of(images: np.ndarray) -> mmap.mmap | None:
    """The mapped file that holds an array; None if it is in memory."""
    base: object = images
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def read_ahead(images: np.ndarray, rows: Sequence[int] | np.ndarray) -> None:
    """Begin to read these rows of an `image_array` from the disk, in the background; nothing if it is in memory."""
    mapping = mapping_of(images)
    if mapping is None:
        return
    size = images[0].nbytes
    for row in np.asarray(rows).tolist():
        start = row * size // mmap.PAGESIZE * mmap.PAGESIZE
        for first, end in pairwise([*range(start, (row + 1) * size, _READ_AHEAD), (row + 1) * size]):
            mapping.madvise(mmap.MADV_WILLNEED, first, end - first)

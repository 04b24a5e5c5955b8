"""Budgets: the memory that a file or a model will need, compared with what there is before anything is allocated."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container
# Data that compress better than this are no data: an unwritten array, or a bomb. Deflate reaches 1,032 at most.
_MOST_EXPANSION = 1000
_FREE_BYTES = 64 * 2**20  # that a file of any size may expand to


def memory_bytes() -> int:
    """Memory of this machine, or of the container."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or one without a limit
        memory = min(memory, int(_CGROUP_LIMIT.read_text()))
    return memory


def gib(size: float) -> str:
    """A number of bytes in GiB."""
    return f"{size / 2**30:,.1f} GiB"


def over_memory(size: int) -> str | None:
    """Predicate of something that takes `size` bytes, if this machine has less memory; otherwise None."""
    memory = memory_bytes()
    if size <= memory:
        return None
    return (
        f"would take {gib(size)}, and this machine has {gib(memory)} of memory; use a smaller one, or a machine with "
        "more memory"
    )


def expansion_limit(stored: int) -> int:
    """Most bytes that `stored` bytes of a file may expand to."""
    return max(_FREE_BYTES, _MOST_EXPANSION * stored)


def over_expansion(size: int, stored: int) -> str | None:
    """Predicate of content that expands from `stored` to `size` bytes, or None if data can compress that well."""
    if size <= expansion_limit(stored):
        return None
    return (
        f"would take {gib(size)} of memory, more than {_MOST_EXPANSION:,} times the {stored:,} bytes stored; it was "
        "declared without being written, or is a decompression bomb; use another copy"
    )

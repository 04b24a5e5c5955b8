"""Budgets: the memory that a file or a model will need, compared with what there is before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# Controllers of a line of it -> folder of the groups, files of limit and use, prefix of counters; versions 2 and 1.
_VERSIONS = {
    "": ("", "memory.max", "memory.current", ""),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
_MEMINFO = Path("/proc/meminfo")
# Data that compress better than this are no data: an unwritten array, or a bomb. Deflate reaches 1,032 at most.
_MOST_EXPANSION = 1000
_FREE_BYTES = 64 * 2**20  # that a file of any size may expand to


def memory_bytes() -> int:
    """Memory of this machine, or the limit of its control groups (of a container, or of a job of Slurm)."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([memory, *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Memory that a process can still allocate, of this machine or of its control groups, shared among local ranks.

    Pages of files that the kernel can drop count as available.
    """
    available = memory_bytes()
    with suppress(OSError, ValueError, KeyError):
        available = min(available, 1024 * _numbers(_MEMINFO, separator=":")["MemAvailable"])
    available = min([available, *(limit - used for limit, used in _limits())])
    return max(0, available) // local_ranks()


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, used without files that the kernel can drop) of this process's control groups and those above them."""
    lines = []
    with suppress(OSError):
        lines = _OWN_GROUPS.read_text().splitlines()
    for line in lines or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers not in _VERSIONS:
            continue
        folder, limit_file, use_file, prefix = _VERSIONS[controllers]
        root = _CONTROL_GROUPS / folder
        own = root / path.lstrip("/")  # absent in a container, which sees its own group as the root
        for group in (own, *(group for group in own.parents if group.is_relative_to(root))):
            with suppress(OSError, ValueError, KeyError):  # a group without a limit
                limit, used = (int((group / name).read_text()) for name in (limit_file, use_file))
                counters = _numbers(group / "memory.stat")
                yield limit, used - counters[f"{prefix}active_file"] - counters[f"{prefix}inactive_file"]


def _numbers(path: Path, separator: str | None = None) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.split(separator) for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) for name, value in lines}


def local_ranks() -> int:
    """Number of ranks on this machine, as launchers of distributed training export it."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


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

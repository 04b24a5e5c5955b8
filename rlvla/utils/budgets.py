"""Budgets: the memory that a file or a model will need, compared with what there is before anything is allocated."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container
_OWN_CGROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
# Data that compress better than this are no data: an unwritten array, or a bomb. Deflate reaches 1,032 at most.
_MOST_EXPANSION = 1000
_FREE_BYTES = 64 * 2**20  # that a file of any size may expand to


def memory_bytes() -> int:
    """Memory of this machine, or of the container."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or one without a limit
        memory = min(memory, int(_CGROUP_LIMIT.read_text()))
    return memory


def available_bytes() -> int:
    """Memory that a process can still allocate, of this machine or of its control groups, shared among local ranks.

    Pages of files that the kernel can drop count as available.
    """
    available = memory_bytes()
    with suppress(OSError, ValueError, KeyError):
        available = min(available, 1024 * _numbers(_MEMINFO, separator=":")["MemAvailable"])
    for group in _control_groups():
        with suppress(OSError, ValueError, KeyError):  # a group without a limit
            limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
            usage = _numbers(group / "memory.stat")
            available = min(available, limit - used + usage["active_file"] + usage["inactive_file"])
    return max(0, available) // local_ranks()


def _control_groups() -> list[Path]:
    """The control group (version 2) of this process and those above it, each of which may limit its memory."""
    root = _CGROUP_LIMIT.parent
    with suppress(OSError):
        for line in _OWN_CGROUP.read_text().splitlines():
            if line.startswith("0::/"):
                own = root / line.removeprefix("0::/")
                return [own, *(group for group in own.parents if group.is_relative_to(root))]
    return [root]


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

"""Processes that tests start, watch and end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MARK = "RLVLA_TEST_RUN"  # an environment variable by which a test knows what it has started, in whatever session


def running(pattern: str, group: int | str) -> set[int]:
    """Live processes with the pattern in their command line, of a session (its number) or with a value of `MARK`."""
    wanted, pids = f"{MARK}={group}".encode(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            chosen = int(session) == group
            if isinstance(group, str):
                chosen = wanted in (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if pattern in command and state not in "ZX" and chosen:
            pids.add(int(entry.name))
    return pids


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    """Whether a process has not ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

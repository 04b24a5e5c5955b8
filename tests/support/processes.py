"""Processes that tests start, watch and end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def running(pattern: str, group: int) -> set[int]:
    """Live processes of a process group or session with the pattern in their command line."""
    pids = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if pattern in command and state not in "ZX" and int(session) == group:
            pids.add(int(entry.name))
    return pids


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

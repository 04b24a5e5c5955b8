"""Kill the descendants of a process after its end, e.g. programs started by a simulator.

A worker's descendants inherit a mark in their environment, also those that left its process group. The worker runs this
file as a program that outlives it, because the parent of the worker may have been killed as well:

    python -I -S guardian.py PID
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

# Environment variable with the mark of a worker.
MARK = "RLVLA_WORKER_MARK"
# Maximum passes over the processes: one may start others while it is being killed.
_ROUNDS = 20


def new_mark() -> str:
    """A unique mark."""
    return f"{os.getpid()}-{os.urandom(8).hex()}"


def kill_marked(marks: Collection[str]) -> None:
    """Kill all processes with one of these marks, except this one (Linux; elsewhere without effect)."""
    marked = {f"{MARK}={mark}".encode() for mark in marks}
    for _ in range(_ROUNDS if marked else 0):
        left = [pid for pid, variables in _environments() if not marked.isdisjoint(variables)]
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    """(pid, environment at start) of all other running processes of this user."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    yield int(name), file.read().split(b"\0")
            except OSError:  # it has ended, or belongs to another user
                continue


def guard_this_process() -> None:
    """Start the guardian of this process, which must have a mark in its environment."""
    guard(os.getpid(), os.environ)


def guard(pid: int, environment: Mapping[str, str]) -> None:
    """Start a guardian that kills all processes with the mark in `environment` once the process `pid` has ended."""
    import subprocess  # not needed by the guardian itself, which should start fast

    if hasattr(os, "pidfd_open"):
        command = [sys.executable, "-I", "-S", __file__, str(pid)]
        with suppress(OSError):  # without a guardian, the parent of the marked processes ends them
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, check=False)


def main() -> None:
    """Entry point: wait in the background for the end of a process, then kill processes with the same mark."""
    try:
        watched = os.pidfd_open(int(sys.argv[1]))
    except OSError:  # an old kernel
        return
    if os.fork():  # the worker waits for this process only; the guardian is a daemon
        return
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    waiting = select.poll()
    waiting.register(watched, select.POLLIN)
    waiting.poll()
    kill_marked([os.environ[MARK]])


if __name__ == "__main__":
    main()

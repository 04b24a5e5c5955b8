"""Ends what a simulator or another program has started, once a process has ended for whatever reason.

A worker's descendants inherit a mark in their environment; it finds those that left its process group as well. The
worker runs this file as a program that outlives it, because whoever started the worker may have been killed, too:

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
# A process may start others while it is being killed; what goes on for longer than this is no accident.
_ROUNDS = 20


def new_mark() -> str:
    """A mark that no other worker has."""
    return f"{os.getpid()}-{os.urandom(8).hex()}"


def kill_marked(marks: Collection[str]) -> None:
    """Kill all processes with one of these marks, except this one (Linux; elsewhere without effect)."""
    wanted = {f"{MARK}={mark}".encode() for mark in marks}
    for _ in range(_ROUNDS if wanted else 0):
        left = [pid for pid, variables in _environments() if not wanted.isdisjoint(variables)]
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    """Every other running process of this user, with the environment in which it was started."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    yield int(name), file.read().split(b"\0")
            except OSError:  # it has ended, or belongs to someone else
                continue


def guard_this_process() -> None:
    """Start the guardian of this process, which must have a mark in its environment."""
    guard(os.getpid(), os.environ)


def guard(pid: int, environment: Mapping[str, str]) -> None:
    """Start a guardian that outlives a process of this machine and then kills what has the mark in `environment`."""
    import subprocess  # not needed by the guardian itself, which should start fast

    if hasattr(os, "pidfd_open"):
        command = [sys.executable, "-I", "-S", __file__, str(pid)]
        with suppress(OSError):  # without one, whoever started the marked processes ends them
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, check=False)


def main() -> None:
    """Entry point: wait in the background for the end of a process, then kill what has the same mark."""
    try:
        watched = os.pidfd_open(int(sys.argv[1]))
    except OSError:  # an old kernel
        return
    if os.fork():  # the worker waits for this process, not for the guardian, which is nobody's child
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

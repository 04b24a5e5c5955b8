"""Kill the helper processes of a process after its end: workers, vLLM, and programs that simulators have started.

They inherit a mark in their environment, also those that left the process group. With the first mark, a process starts
this file as a program that outlives it, whichever thread starts the helpers and whether they run or are stopped:

    python -I -S guardian.py PID MARK
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

# Environment variable with the mark of a helper process.
MARK = "RLVLA_WORKER_MARK"
# Maximum passes over the processes: one may start others while it is being killed.
_ROUNDS = 20
_START_SECONDS = 0.02  # between passes while a process is being started
_POLL_SECONDS = 0.5  # without pidfd
_PROC = "/proc"
_KERNEL_THREAD = 0x00200000  # flag of /proc/PID/stat
_own_mark = 0, ""  # of this process (by id, as a fork inherits the variable): its helpers' marks begin with it


def new_mark() -> str:
    """A unique mark for a helper process; it is killed once this process has ended (Linux).

    Elsewhere a helper ends when it reads from its closed connection.
    """
    global _own_mark
    pid = os.getpid()
    if _own_mark[0] != pid:
        _own_mark = pid, f"{pid}-{os.urandom(8).hex()}"
        _start_guardian(*_own_mark)
    return f"{_own_mark[1]}.{os.urandom(8).hex()}"


def _start_guardian(pid: int, mark: str) -> None:
    import subprocess  # not needed by the guardian itself, which should start fast

    command = [sys.executable, "-I", "-S", __file__, str(pid), mark]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    with suppress(OSError):  # helpers still end when they read from their closed connections
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, check=False)


def kill_marked(marks: Collection[str]) -> None:
    """Kill all processes with one of these marks, except this one (Linux; elsewhere without effect)."""
    for _ in range(_ROUNDS if marks else 0):
        marked = list(_marked())
        left = [pid for pid, mark in marked if any(mark == one or mark.startswith(f"{one}.") for one in marks)]
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left and "" not in dict(marked).values():
            return
        time.sleep(0 if left else _START_SECONDS)


def _marked() -> Iterator[tuple[int, str]]:
    """(pid, mark) of all other running processes of this user that have a mark; "" while a process is being started."""
    try:
        names = os.listdir(_PROC)
    except OSError:
        return
    start = f"{MARK}=".encode()
    for name in names:
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"{_PROC}/{name}/environ", "rb") as file:
                    variables = file.read().split(b"\0")
            except OSError:  # it has ended, or belongs to another user
                continue
            if variables == [b""] and _is_starting(int(name)):
                yield int(name), ""
            yield from ((int(name), v[len(start) :].decode(errors="replace")) for v in variables if v.startswith(start))


def _is_starting(pid: int) -> bool:
    """Whether a process has neither environment nor arguments because its program is being loaded (`execve`).

    Kernel threads and ended processes have none either.
    """
    try:
        with open(f"{_PROC}/{pid}/cmdline", "rb") as file, open(f"{_PROC}/{pid}/stat", "rb") as status:
            arguments, fields = file.read(), status.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return not arguments and fields[0] not in (b"Z", b"X") and not int(fields[6]) & _KERNEL_THREAD


def _wait_for_end(pid: int) -> None:
    """Wait until a process has ended, reaped or not."""
    try:
        watched = os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel, or it has ended
        while _runs(pid):
            time.sleep(_POLL_SECONDS)
        return
    waiting = select.poll()
    waiting.register(watched, select.POLLIN)
    waiting.poll()


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> None:
    """Entry point: wait in the background for the end of a process, then kill its helpers."""
    if os.fork():  # its starter waits for this process only; the guardian is a daemon
        return
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    _wait_for_end(int(sys.argv[1]))
    kill_marked([sys.argv[2]])


if __name__ == "__main__":
    main()

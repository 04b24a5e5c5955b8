"""Workers as processes on this machine, connected by a socket and shared memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from pathlib import Path

import rlvla
from rlvla.envs.workers.backend import WorkerGoneError, WorkerOptions
from rlvla.envs.workers.messages import (
    Hello,
    SlotAnswer,
    SlotCommand,
    pack,
    receive_message,
    send_message,
    unpack,
)
from rlvla.envs.workers.slab import Slab, create_slab_file
from rlvla.utils.errors import ConfigError

# One core per worker. LP_NUM_THREADS is for Mesa's software renderer, which otherwise starts a thread per core.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "LP_NUM_THREADS": "0",
    # `python -m` would search the working directory first, which may contain another copy of rlvla.
    "PYTHONSAFEPATH": "1",
}
# Time for an idle worker to close its environment, and for any worker to react to SIGTERM.
_GRACE_SECONDS, _TERMINATE_SECONDS = 3.0, 1.0


class ProcessChannel:
    """A worker process. Arrays are passed in a slab per slot, everything else through the connection."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection, slabs: Sequence[Slab], python: str):
        self.process = process
        self.connection = connection
        self._slabs = slabs
        self._python = python

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def place(self) -> str:
        """The interpreter."""
        return f"'{self._python}'"

    def send(self, commands: Sequence[SlotCommand]) -> None:
        """Send commands as one message."""
        message = [(slot, pack(command, self._slabs[slot])) for slot, command in commands]
        try:
            send_message(self.connection, message)
        except OSError as error:
            raise WorkerGoneError from error

    def receive(self) -> Hello | list[SlotAnswer]:
        """Read one message."""
        try:
            message = receive_message(self.connection)
        except (EOFError, OSError) as error:
            raise WorkerGoneError from error
        if not isinstance(message, list):
            return message
        return [(slot, unpack(answer, self._slabs[slot])) for slot, answer in message]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def reap(self) -> str:
        """Ensure that the process has ended."""
        self.release()
        # After its connection broke, a process usually ends by itself; wait for its exit code.
        _wait_for_exit([self.process], _TERMINATE_SECONDS)
        self.process.kill()
        return _describe_exit(self.process.wait())

    def release(self) -> None:
        """Close this side's file descriptors; the worker then ends by itself."""
        self.connection.close()
        for slab in self._slabs:
            slab.close()

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        return resident_bytes(self.pid)


class ProcessBackend:
    """Starts worker processes.

    Args:
        python: interpreter of the workers.
    """

    def __init__(self, python: str = sys.executable):
        self._python = python

    def start(self, options: WorkerOptions) -> ProcessChannel:
        """Start a process; ConfigError if the interpreter cannot be started."""
        ours, theirs = socket.socketpair()
        slab_fds = [create_slab_file() for _ in range(options.num_slots)]
        with theirs:
            command = [self._python, "-m", "rlvla.envs.workers.worker"]
            command += ["--connection_fd", str(theirs.fileno()), "--slab_fds", *map(str, slab_fds)]
            # The kernel watches the thread that starts the worker; only the main thread lives as long as the process.
            if threading.current_thread() is threading.main_thread():
                command += ["--parent_pid", str(os.getpid())]
            command += ["--custom_modules", *options.custom_modules]
            try:
                with _interrupts_blocked():
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=2,  # simulator output belongs to the diagnostics
                        env=worker_environment(options.environment),
                        pass_fds=(theirs.fileno(), *slab_fds),
                    )
            except OSError as error:
                ours.close()
                for fd in slab_fds:
                    os.close(fd)
                raise ConfigError(f"cannot start environment workers with '{self._python}': {error}") from error
        return ProcessChannel(process, Connection(ours.detach()), [Slab(fd) for fd in slab_fds], self._python)

    def wait(self, channels: Sequence[ProcessChannel], timeout: float | None) -> Sequence[ProcessChannel]:
        """Channels that sent a message or ended."""
        ready = set(mp_connection.wait([channel.connection for channel in channels], timeout))
        return [channel for channel in channels if channel.connection in ready]

    def close(self, idle: Sequence[ProcessChannel], busy: Sequence[ProcessChannel]) -> None:
        """Close the connections, after which idle workers end by themselves; terminate busy ones."""
        processes = [channel.process for channel in (*idle, *busy)]
        for channel in (*idle, *busy):
            channel.release()
        for channel in busy:
            channel.process.terminate()
        for send_signal, patience in (
            (subprocess.Popen.terminate, _GRACE_SECONDS),
            (subprocess.Popen.kill, _TERMINATE_SECONDS),
        ):
            _wait_for_exit(processes, patience)
            for process in processes:
                send_signal(process)  # no effect on a process that has ended
        for process in processes:
            process.wait()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes with SIGINT blocked, until they unblock it.

    Ctrl-C reaches the whole process group, and a worker still importing modules would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def resident_bytes(pid: int | str) -> int:
    """Resident memory in bytes of a process ("self": this one); 0 if unavailable or the process has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a worker, such that it imports the same copy of rlvla as this process."""
    environment = {**os.environ, **WORKER_ENVIRONMENT, **extra}
    environment.setdefault("MUJOCO_GL", "egl")
    root = str(Path(rlvla.__file__).resolve().parents[1])
    # Not for an installed rlvla: the rest of its site-packages may be incompatible with another interpreter.
    if Path(root).name not in ("site-packages", "dist-packages"):
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
    return environment


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"the process ended with exit code {returncode}; what it printed is above"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # real-time signals have numbers only
        name = str(-returncode)
    hint = " (out of memory, perhaps)" if name == "SIGKILL" else ""
    return f"the process was killed by signal {name}{hint}"


def _wait_for_exit(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return

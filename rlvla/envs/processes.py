"""Workers as processes of this machine, reached through a socket and shared memory."""

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
from typing import Any

import rlvla
from rlvla.envs.backend import WorkerGoneError, WorkerOptions
from rlvla.envs.messages import Command, pack, receive_message, send_message, unpack
from rlvla.envs.slab import Slab, create_slab_file
from rlvla.utils.errors import ConfigError

# One core per worker. LP_NUM_THREADS is Mesa's software renderer, which otherwise starts a thread per core.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "LP_NUM_THREADS": "0",
    # `python -m` would look in the working directory first, where another copy of rlvla may lie.
    "PYTHONSAFEPATH": "1",
}
# How long an idle worker may take to close its environment, and any worker to heed SIGTERM.
_GRACE_SECONDS, _TERMINATE_SECONDS = 3.0, 1.0


class ProcessChannel:
    """A worker process. Arrays go through the slab, everything else through the connection."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection, slab: Slab, python: str):
        self.process = process
        self.connection = connection
        self._slab = slab
        self._python = python

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def place(self) -> str:
        """The interpreter."""
        return f"'{self._python}'"

    def send(self, command: Command) -> None:
        """Hand over a command."""
        message = pack(command, self._slab)
        try:
            send_message(self.connection, message)
        except OSError as error:
            raise WorkerGoneError from error

    def receive(self) -> Any:
        """Read one message."""
        try:
            message = receive_message(self.connection)
        except (EOFError, OSError) as error:
            raise WorkerGoneError from error
        return unpack(message, self._slab)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def bury(self) -> str:
        """Make sure that the process is gone."""
        self.release()
        # A process whose connection broke is about to end by itself, and how it ends is worth knowing.
        _wait_for_exit([self.process], _TERMINATE_SECONDS)
        self.process.kill()
        return _describe_exit(self.process.wait())

    def release(self) -> None:
        """Close this side's descriptors; the worker then ends by itself."""
        self.connection.close()
        self._slab.close()

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        return resident_bytes(self.pid)


class ProcessBackend:
    """Starts worker processes.

    Args:
        python: the interpreter to run them with.
    """

    def __init__(self, python: str = sys.executable):
        self._python = python

    def start(self, options: WorkerOptions) -> ProcessChannel:
        """Start a process; ConfigError if the interpreter cannot be started."""
        ours, theirs = socket.socketpair()
        slab_fd = create_slab_file()
        with theirs:
            command = [self._python, "-m", "rlvla.envs.worker"]
            command += ["--connection_fd", str(theirs.fileno()), "--slab_fd", str(slab_fd)]
            # The kernel watches the starting thread, which only in the main thread's case means the process.
            if threading.current_thread() is threading.main_thread():
                command += ["--parent_pid", str(os.getpid())]
            command += ["--custom_modules", *options.custom_modules]
            try:
                with _interrupts_blocked():
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=2,  # what simulators print belongs among the diagnostics
                        env=worker_environment(options.environment),
                        pass_fds=(theirs.fileno(), slab_fd),
                    )
            except OSError as error:
                ours.close()
                os.close(slab_fd)
                raise ConfigError(f"cannot start environment workers with '{self._python}': {error}") from error
        return ProcessChannel(process, Connection(ours.detach()), Slab(slab_fd), self._python)

    def wait(self, channels: Sequence[ProcessChannel], timeout: float | None) -> Sequence[ProcessChannel]:
        """Those that have sent something or ended."""
        ready = set(mp_connection.wait([channel.connection for channel in channels], timeout))
        return [channel for channel in channels if channel.connection in ready]

    def close(self, idle: Sequence[ProcessChannel], busy: Sequence[ProcessChannel]) -> None:
        """An idle worker ends when its connection is closed, a busy one is terminated."""
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
                send_signal(process)  # does nothing to a process that has ended
        for process in processes:
            process.wait()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process started in the block sees no SIGINT until it unblocks it.

    Ctrl-C reaches the whole process group, and a worker that still imports modules would end with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def resident_bytes(pid: int | str) -> int:
    """Resident memory of a process ("self": of this one); 0 where the system does not tell, or the process is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a worker, in which `import rlvla` finds what this process has imported."""
    environment = {**os.environ, **WORKER_ENVIRONMENT, **extra}
    environment.setdefault("MUJOCO_GL", "egl")
    root = str(Path(rlvla.__file__).resolve().parents[1])
    # An installed package is found anyway, and the rest of its site-packages may not suit another interpreter.
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

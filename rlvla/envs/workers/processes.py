"""Workers as processes on this machine, connected by a socket and shared memory."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rlvla import version
from rlvla.envs.workers.backend import WorkerGoneError, WorkerOptions
from rlvla.envs.workers.codec import decode_message
from rlvla.envs.workers.guardian import MARK, kill_marked, new_mark
from rlvla.envs.workers.messages import Hello, SlotAnswer, SlotCommand, dump_commands, pack
from rlvla.envs.workers.slab import ArrayRef, Slab, create_slab_file
from rlvla.utils.errors import ConfigError

_EGL_DEVICE = "MUJOCO_EGL_DEVICE_ID"
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
# Seconds for an idle worker to close its environment, and for any worker to react to SIGTERM.
_GRACE_SECONDS, _TERMINATE_SECONDS = 3.0, 1.0
# Seconds in which a worker must read a command.
_SEND_SECONDS = 5.0
# Seconds between checks for ended processes: while ending workers, and on systems without pidfd.
_END_TICK, _POLL_SECONDS = 0.005, 0.5
# Message length, big-endian, as in `multiprocessing.connection.Connection`, which the worker uses.
_HEADER = struct.Struct("!i")
_READ_BYTES = 2**16


class ProcessChannel:
    """A worker process; arrays are passed in one slab per slot, everything else through a socket.

    Args:
        process: the process, which leads a new session and process group.
        connection: socket to the process.
        slabs: shared memory of each slot.
        python: its interpreter.
        mark: mark of its descendants, see `rlvla.envs.workers.guardian`.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        slabs: Sequence[Slab],
        python: str,
        mark: str,
    ):
        connection.settimeout(_SEND_SECONDS)  # for sending; nothing waits to receive
        self.process, self.mark = process, mark
        self.connection = connection
        self.inbox = Inbox(connection)
        self.death = _death_of(process.pid)
        self._slabs, self._python = slabs, python

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def place(self) -> str:
        """The interpreter."""
        return f"'{self._python}'"

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; it stays a zombie, so that the ids of process and group are not reused."""
        if self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it was reaped elsewhere
            return True

    def send(self, commands: Sequence[SlotCommand]) -> None:
        """Send commands as one message."""
        message = [(slot, pack(command, self._slabs[slot])) for slot, command in commands]
        try:
            send_message(self.connection, dump_commands(message))
        except TimeoutError as error:  # part of the message may have been sent
            self.kill()
            raise WorkerGoneError from error
        except OSError as error:
            raise WorkerGoneError from error

    def receive(self) -> Hello | list[SlotAnswer]:
        """Read one message."""
        message = self.inbox.take()
        if message is None:
            raise WorkerGoneError
        return decode_message(message, self._load)

    def _load(self, reference: dict[str, Any]) -> np.ndarray:
        return self._slabs[reference.pop("slot")].read(ArrayRef(**reference))

    def kill(self) -> None:
        """SIGKILL the process group."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Ensure that the process and its descendants have ended."""
        self.release()
        # After its connection broke, a process usually ends by itself; wait for its exit code.
        _wait_for_end([self], _TERMINATE_SECONDS)
        return _describe_exit(_bury([self])[0])

    def release(self) -> None:
        """Close this side's connection and shared memory; the worker then ends by itself."""
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
        mark = new_mark()
        with theirs:
            command = [self._python, "-m", "rlvla.envs.workers.worker"]
            command += ["--connection_fd", str(theirs.fileno()), "--slab_fds", *map(str, slab_fds)]
            command += ["--custom_modules", *options.custom_modules]
            command += ["--max_kept", str(options.max_kept)]
            try:
                with _interrupts_blocked():
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=2,  # simulator output belongs to the diagnostics
                        env=worker_environment({**egl_device(nvidia_devices()), **options.environment, MARK: mark}),
                        pass_fds=(theirs.fileno(), *slab_fds),
                        # A terminal's Ctrl-C and hang-up are for the pool's process; and the group can be killed.
                        start_new_session=True,
                    )
            except OSError as error:
                ours.close()
                for fd in slab_fds:
                    os.close(fd)
                raise ConfigError(f"cannot start environment workers with '{self._python}': {error}") from error
        return ProcessChannel(process, ours, [Slab(fd) for fd in slab_fds], self._python, mark)

    def wait(self, channels: Sequence[ProcessChannel], timeout: float | None) -> Sequence[ProcessChannel]:
        """Channels that sent a complete message or ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = select.poll()
        reading = {channel.connection.fileno(): channel for channel in channels}
        for descriptor in reading:
            waiting.register(descriptor, select.POLLIN)
        dying = {channel.death: channel for channel in channels if channel.death is not None}
        for descriptor in dying:
            waiting.register(descriptor, select.POLLIN)
        ended: set[ProcessChannel] = set()
        ready = [channel for channel in channels if channel.inbox.is_ready]
        while True:
            left = 0.0 if ready else None if deadline is None else max(0.0, deadline - time.monotonic())
            if len(dying) < len(channels):  # no descriptor announces the end of every process
                left = _POLL_SECONDS if left is None else min(left, _POLL_SECONDS)
                ended |= {channel for channel in channels if channel.has_ended}
            for descriptor, _ in waiting.poll(None if left is None else math.ceil(1000 * left)):
                if descriptor in dying:
                    ended.add(dying[descriptor])
                else:
                    reading[descriptor].inbox.fill()
            for channel in ended:
                channel.inbox.fill()  # messages sent before its end
            ready = [channel for channel in channels if channel in ended or channel.inbox.is_ready]
            if ready or (deadline is not None and time.monotonic() >= deadline):
                return ready

    def close(self, idle: Sequence[ProcessChannel], busy: Sequence[ProcessChannel]) -> None:
        """Close the connections, after which idle workers end by themselves; terminate busy ones."""
        channels = [*idle, *busy]
        for channel in channels:
            channel.release()
        for channel in busy:
            _terminate(channel)
        _wait_for_end(channels, _GRACE_SECONDS)
        for channel in channels:
            _terminate(channel)  # no effect on a process that has ended
        _wait_for_end(channels, _TERMINATE_SECONDS)
        _bury(channels)


def _terminate(channel: ProcessChannel) -> None:
    with suppress(ProcessLookupError):
        os.kill(channel.pid, signal.SIGTERM)


def _bury(channels: Sequence[ProcessChannel]) -> list[int]:
    """Kill the processes and their descendants, and return their exit codes."""
    for channel in channels:
        channel.kill()
    kill_marked([channel.mark for channel in channels])
    for channel in channels:
        if channel.death is not None:
            os.close(channel.death)
            channel.death = None
    return [channel.process.wait() for channel in channels]


def _death_of(pid: int) -> int | None:
    """A pidfd, which becomes readable when the process ends; None on systems without pidfd."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _wait_for_end(channels: Sequence[ProcessChannel], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not all(channel.has_ended for channel in channels) and time.monotonic() < deadline:
        time.sleep(_END_TICK)


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


def nvidia_devices() -> list[str]:
    """Device files of the NVIDIA GPUs that this process may use; EGL and CUDA number them in this order."""
    return sorted(map(str, Path("/dev").glob("nvidia[0-9]*")), key=lambda path: int(path.removeprefix("/dev/nvidia")))


def egl_device(devices: Sequence[str]) -> dict[str, str]:
    """The variable that makes MuJoCo render on the GPU of this rank, where there are several; {} leaves the choice.

    Args:
        devices: from `nvidia_devices`.
    """
    if len(devices) < 2 or _EGL_DEVICE in os.environ:
        return {}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = rank if not visible else visible[rank % len(visible)]
    if not str(device).isdigit() or int(device) >= len(devices):  # a UUID, or a number of another enumeration
        return {}
    return {_EGL_DEVICE: str(device)}


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a worker, such that it imports the same copy of rlvla as this process."""
    environment = {**os.environ, **WORKER_ENVIRONMENT, **extra}
    environment.setdefault("MUJOCO_GL", "egl")
    root = str(Path(version.__file__).resolve().parents[1])
    # Not for an installed rlvla: the rest of its site-packages may be incompatible with another interpreter.
    if Path(root).name not in ("site-packages", "dist-packages"):
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
    return environment


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"the process ended with exit code {returncode}; its output is above"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # real-time signals have numbers only
        name = str(-returncode)
    hint = " (out of memory, perhaps)" if name == "SIGKILL" else ""
    return f"the process was killed by signal {name}{hint}"


class Inbox:
    """Receive buffer of a non-blocking socket.

    Args:
        connection: a socket that does not block.

    Attributes:
        at_end: whether the other side has closed the connection.
    """

    def __init__(self, connection: socket.socket):
        self._fd = connection.fileno()
        self._bytes = bytearray()
        self.at_end = False

    @property
    def is_ready(self) -> bool:
        """Whether a message is complete or will never be."""
        return self.at_end or self._message_end() is not None

    def _message_end(self) -> int | None:
        if len(self._bytes) < _HEADER.size:
            return None
        end: int = _HEADER.size + _HEADER.unpack_from(self._bytes)[0]
        return end if len(self._bytes) >= end else None

    def fill(self) -> None:
        """Read available bytes until a message is complete."""
        while not self.is_ready:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the connection was reset
                data = b""
            self._bytes += data
            self.at_end = not data

    def take(self) -> bytes | None:
        """Remove and return the first message; None if there is none."""
        end = self._message_end()
        if end is None:
            return None
        message = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        return message


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send a message within the socket's timeout; OSError if the other side is gone or does not read."""
    connection.sendall(_HEADER.pack(len(message)) + message)

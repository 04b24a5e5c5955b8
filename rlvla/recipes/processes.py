"""Running a command as a process of its own: plain Python or several ranks, and its end when the recipe is stopped."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from rlvla.utils.signals import record, taken_over
from rlvla.utils.terminal import IN_RECIPE

_LOOK_SECONDS = 0.1
_BEAT_SECONDS = 5.0
_TERMINAL_SECONDS = 1.0  # in which Ctrl-C, which the terminal sends to all processes, has reached the command itself
_REMAINS_SECONDS = 60.0  # ranks whose launcher has ended save a checkpoint within this time
_LIBC = ctypes.CDLL(None, use_errno=True)
# prctl(2)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Without any of these the deepspeed launcher warns, twice, that it found no accelerator.
ACCELERATOR_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")


class Signals:
    """The first signal that asked the recipe to stop.

    Attributes:
        received: its number, or 0.
    """

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def caught(self) -> Iterator[Signals]:
        """Catch signals within the block, which ends when the command that is running has ended."""
        with taken_over(self._handle, lambda: self.received != 0):
            yield self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        record(number)


def ranks_of(processes: int) -> int:
    """How many are launched where a recipe asks for `processes`: where there are GPUs no more, and a divisor.

    Amounts that the asked number divides, such as batch sizes, are divided by the launched number as well.
    """
    gpus = num_gpus() if processes > 1 else 0
    return next(ranks for ranks in range(min(processes, gpus or processes), 0, -1) if processes % ranks == 0)


@functools.cache
def num_gpus() -> int:
    """GPUs on which ranks would compute; torch is asked in a process of its own, since recipes do not load it."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not any(map(os.path.exists, ACCELERATOR_FILES)):
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = asked.stdout.split()[-1:]
    return int(last[0]) if last and last[0].isdigit() else 0


def command_words(program: Sequence[str], flags: Sequence[str], processes: int) -> list[str]:
    """The words that start a command.

    Args:
        program: the command without an interpreter: a file, or `-m` and a module.
        flags: its flags.
        processes: number of ranks; 1 needs no launcher.
    """
    if processes == 1:
        return [sys.executable, *program, *flags]
    module = program[0] == "-m"
    ranks = ["-q", "--num_accelerators", str(processes), "--master_port", str(_free_port())]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", *ranks]
    return [*launcher, *(["--module", *program[1:]] if module else program), *flags]


def run(words: Sequence[str], signals: Signals, beat: Callable[[float], None], lock: int) -> int:
    """Run a command to its end; on a signal it is asked to stop, too.

    It stops as well if this process is killed, and holds the lock until it has ended.

    Args:
        words: see `command_words`.
        signals: those that were received.
        beat: called every few seconds with the seconds so far.
        lock: descriptor of the lock of the folder.

    Returns:
        The exit status; negative if a signal ended the process.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    started = time.monotonic()
    next_beat = started + _BEAT_SECONDS
    parent = os.getpid()

    def with_its_parent() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    child = subprocess.Popen(words, env=_environment(words), preexec_fn=with_its_parent, pass_fds=[lock])
    asked = None
    while (status := child.poll()) is None:
        time.sleep(_LOOK_SECONDS)
        now = time.monotonic()
        if signals.received and asked is None:
            asked = now + _TERMINAL_SECONDS
        if asked is not None and now > asked:
            asked = float("inf")
            child.terminate()
        if now >= next_beat:
            beat(now - started)
            next_beat = now + _BEAT_SECONDS
    beat(time.monotonic() - started)
    if signals.received or status:
        _wait_for_remains()
    return status


def _wait_for_remains() -> None:
    """Wait for ranks that outlive their launcher; this process has inherited them."""
    ends = time.monotonic() + _REMAINS_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < ends:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(_LOOK_SECONDS)


def _environment(words: Sequence[str]) -> dict[str, str]:
    """That of a stage; a launcher where there is no GPU to be used need not look for one."""
    environment = {**os.environ, IN_RECIPE: "1"}
    if "deepspeed.launcher.runner" in words and num_gpus() == 0:
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):  # not Linux
        _LIBC.prctl(option, value, 0, 0, 0)

"""Stopping a run on SIGTERM or SIGINT at a point where no work is lost."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
_SHELL_SIGNAL_BASE = 128
_WORKERS_FIRST_SECONDS = 0.5


class StopRequested(SystemExit):
    """Ends a run that was asked to stop; the exit status is 128 + signal number, as in a shell."""

    def __init__(self, signal_number: int):
        super().__init__(_SHELL_SIGNAL_BASE + signal_number)


class BrokenOff(RuntimeError):
    """Work shared by several ranks was interrupted on one of them."""


class _Interrupted(BaseException):
    """Leaves an `attempt`; not an `Exception`, so that ordinary handlers let it pass."""


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block.

    Needed for code that runs finalizers and weak-reference callbacks, such as h5py: Python discards a
    KeyboardInterrupt raised there.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    received: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: received.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        before(signal.SIGINT, received[0])


class StopSignals:
    """Records SIGTERM and SIGINT until the run checks for them.

    The launcher, the terminal and batch systems may each send one, so all but the first are ignored.

    Attributes:
        received: number of the first signal, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._interruptible = False

    @contextmanager
    def caught(self) -> Iterator[StopSignals]:
        """Catch the signals within the block (main thread only)."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = not self.received
        self.received = self.received or number
        if first and os.environ.get("LOCAL_RANK", "0") == "0":
            name = signal.Signals(number).name
            # Not print: the signal may have interrupted one.
            os.write(2, f"\n{name}: stopping at the next safe point, then saving (SIGQUIT or SIGKILL: now)\n".encode())
        if self._interruptible:
            self._interruptible = False
            raise _Interrupted

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Run `work`; a signal interrupts it at once, with None as the result. For work repeated after a resume."""
        try:
            try:
                self._interruptible = True
                if self.received:
                    return None
                return work()
            finally:
                self._interruptible = False
        except _Interrupted:
            return None
        except Exception:
            # A launcher that stops a run may end the environment workers a moment before it signals this process.
            time.sleep(_WORKERS_FIRST_SECONDS)
            if self.received:
                return None
            raise


def resume_command(argv: Sequence[str]) -> str:
    """The command that resumes the run started with `argv` (`sys.argv`), to be run in the same folder."""
    words = [word for word in argv if not word.startswith("--local_rank")]
    if "--load_checkpoint" not in words:
        words.append("--load_checkpoint")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    launcher = ["python"]
    if world > 1 or len(words) < len(argv):
        launcher = ["deepspeed", "-q", "--num_accelerators", str(world)]
    return shlex.join([*launcher, *words])

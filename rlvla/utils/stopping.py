"""Ending a run on SIGTERM or SIGINT at a point where nothing is lost."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
_SHELL_SIGNAL_BASE = 128
_WORKERS_FIRST_SECONDS = 0.5


class StopRequested(SystemExit):
    """Ends a run that was asked to stop, with the exit status that shells give to that signal (128 + number)."""

    def __init__(self, signal_number: int):
        super().__init__(_SHELL_SIGNAL_BASE + signal_number)


class BrokenOff(RuntimeError):
    """Work that several ranks share was broken off on one of them."""


class _Interrupted(BaseException):
    """Leaves an `attempt`; no handler of ordinary errors may catch it."""


class StopSignals:
    """Remembers SIGTERM and SIGINT until the run asks.

    The launcher, the terminal and batch systems send several of them, so that all but the first are ignored.

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
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"\n{name}: stopping at the next safe point, then saving (SIGQUIT or SIGKILL: now)\n".encode())
        if self._interruptible:
            self._interruptible = False
            raise _Interrupted

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Run `work`, which a signal breaks off at once: None then. For what is done again when the run goes on."""
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
            # A launcher that ends a run may end the environment workers a moment before it tells this process.
            time.sleep(_WORKERS_FIRST_SECONDS)
            if self.received:
                return None
            raise


def resume_command(argv: Sequence[str]) -> str:
    """What continues the run that was started with these words (`sys.argv`), to be typed in the same folder."""
    words = [word for word in argv if not word.startswith("--local_rank")]
    if "--load_checkpoint" not in words:
        words.append("--load_checkpoint")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    launcher = ["python"]
    if world > 1 or len(words) < len(argv):
        launcher = ["deepspeed", "-q", "--num_accelerators", str(world)]
    return shlex.join([*launcher, *words])

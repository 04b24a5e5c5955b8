"""Stopping a run on SIGTERM, SIGINT or SIGHUP at a point where no work is lost."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import ClassVar, TypeVar

from rlvla.utils.cli.programs import typed_command
from rlvla.utils.ending import (
    SHELL_SIGNAL_BASE,
    can_raise,
    cause_of,
    number_of,
    receive,
    record,
    request_of,
    say,
    taken_over,
)

T = TypeVar("T")
_WORKERS_FIRST_SECONDS = 0.5


class StopRequested(SystemExit):
    """Ends a run that was asked to stop; the exit status is 128 + signal number, as in a shell.

    Attributes:
        ckpt_path: folder of the checkpoint, if it is not the run's own.
    """

    def __init__(self, signal_number: int, ckpt_path: Path | None = None):
        super().__init__(SHELL_SIGNAL_BASE + signal_number)
        self.ckpt_path = ckpt_path


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
    """Records SIGTERM, SIGINT and SIGHUP until the run checks for them.

    The launcher, the terminal and batch systems may each send one, so all but the first are ignored.

    Attributes:
        received: number of the first signal, or 0.
    """

    _catching: ClassVar[list[StopSignals]] = []  # those whose block is being executed, the innermost last

    def __init__(self) -> None:
        self.received = 0
        self._interruptible = False

    @contextmanager
    def caught(self) -> Iterator[StopSignals]:
        """Catch the signals within the block (main thread only)."""
        with taken_over(self._handle, lambda: self.received != 0 and not self._interruptible):
            self._catching.append(self)
            try:
                yield self
            finally:
                self._catching.remove(self)

    @classmethod
    def leave_if_asked(cls) -> None:
        """For long waits in such a block, while there is nothing to save.

        Raises:
            StopRequested: a signal has been caught.
        """
        for signals in cls._catching[-1:]:
            if signals.received:
                raise StopRequested(signals.received)

    def of_all_ranks(self, all_reduce: Callable[[dict[str, float], str], Mapping[str, float]]) -> int:
        """Number of a signal that some rank has received, or 0; all ranks call it together.

        A rank that learns of it here receives it, too, and says so: the run may end before the heartbeat passes it on.

        Args:
            all_reduce: reduces named numbers over the ranks, as `DeepspeedStrategy.all_reduce`.
        """
        request = int(all_reduce({"request": float(request_of(self.received))}, "max")["request"])
        if not request:
            return 0
        if not self.received:
            receive(request)
        return number_of(request)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = not self.received
        self.received = self.received or number
        record(number)
        if first and os.environ.get("LOCAL_RANK", "0") == "0":
            say(f"\n{cause_of(number)}: stopping at the next safe point, then saving (SIGQUIT or Ctrl-\\: now)")
        if self._interruptible and can_raise(frame):
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


def _without_named_checkpoint(words: Sequence[str]) -> list[str]:
    """The words without the name of an older checkpoint: the run goes on from the newest."""
    kept: list[str] = []
    for index, word in enumerate(words):
        named = index > 0 and words[index - 1] == "--load_checkpoint" and not word.startswith("-")
        if not named:
            kept.append("--load_checkpoint" if word.startswith("--load_checkpoint=") else word)
    return kept


def resume_command(argv: Sequence[str], ckpt_path: Path | None = None, *, trains: bool = True) -> str:
    """The command that resumes the run started with `argv` (`sys.argv`), to be run in the same folder.

    Args:
        argv: the command line.
        ckpt_path: folder of the checkpoint, if it is not the run's own.
        trains: whether the run trains; one that only evaluates is repeated, with the checkpoint it was given.
    """
    words = [word for word in argv if not word.startswith("--local_rank")]
    launched = len(words) < len(argv)
    if trains:
        words = _without_named_checkpoint(words)
        if "--load_checkpoint" not in words:
            words.append("--load_checkpoint")
    if ckpt_path is not None:
        words += ["--ckpt_path", str(ckpt_path)]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return shlex.join(typed_command(words, world if world > 1 or launched else None))

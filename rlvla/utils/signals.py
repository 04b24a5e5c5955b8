"""Signals: how a command stops early, at once or at a safe point, also if its launcher or another rank is gone.

The first SIGINT, SIGTERM or SIGHUP becomes an exception in the main thread; `StopSignals` may take it over. A thread
sees every signal on arrival, even while the main thread is blocked, and

- sends it again if it came where Python would discard the exception (finalizers, imports);
- ends the process if the main thread does not react soon (a long import), or has not ended it in time;
- sends SIGTERM when the launcher that started this rank is gone.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum, auto
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

from rlvla.utils.launcher import Ancestor, launchers_of_this_rank

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHELL_SIGNAL_BASE = 128
_LAUNCHER_GONE = "the launcher has ended"
_BY_LAUNCHER = 1 << 16  # marks the number of a signal that stands for it
# A rank whose launcher is gone ends within 30 s; other launchers kill 30 s after a SIGTERM.
_SECONDS_TO_END = 25.0
_SECONDS_TO_REACT = 5.0  # a launcher stops its ranks one after another
_LAUNCHER_SECONDS = 1.0  # between two checks of the launcher
_REPEAT_SECONDS = 0.05
_TWICE_SECONDS = 0.3  # Ctrl-C pressed again comes later, one signal sent by several processes earlier
_CAUSES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "the terminal was closed"}
_NOT_BEGUN = "nothing had begun"
_WORKERS_FIRST_SECONDS = 0.5  # a launcher may end environment workers this long before it signals their run
# Code that runs while Python or a C library discards exceptions: finalizers, weak-reference callbacks, h5py's locks,
# and the initialization of modules, which an exception may turn into an abort.
_UNSAFE_FILES = ("<frozen importlib", f"{os.sep}weakref.py", f"{os.sep}_weakrefset.py", f"{os.sep}h5py{os.sep}")


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to end; raised once."""


class _Phase(Enum):
    STARTING = auto()  # modules are imported: a signal ends the process at once
    RUNNING = auto()
    CLOSING = auto()  # the work is done or has been given up


class _Command:
    """State of the command that this process runs."""

    def __init__(self) -> None:
        self.phase = _Phase.STARTING
        self.is_program = False  # this process runs nothing else, so that handlers may stay until it exits
        self.asked = 0  # number of the signal that asked it to end
        self.asked_at = 0.0  # when it last came
        self.has_raised = False  # that signal became an exception
        self.cause = ""  # replaces the name of the signal in messages
        self.resume_hint: Callable[[], str] = lambda: _NOT_BEGUN
        self.may_take_long = False  # a signal is recorded, and the run ends when its state is saved
        self.has_reacted: Callable[[], bool] = lambda: self.asked != 0
        self.is_gone = False  # `end_now` was called
        self.has_printed = False  # the line that says that it ends
        self.has_failed = False  # it ends with an error that other ranks need not have


_command = _Command()


def is_first_rank() -> bool:
    """Whether messages common to all ranks are printed by this process."""
    return os.environ.get("RANK", "0") == "0"


def program() -> str:
    """The file name of the command."""
    return Path(sys.argv[0]).name


def say(text: str) -> None:
    """Write to standard error, also from a signal handler, where `print` may be interrupting another one."""
    silence_closed_outputs()
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


def silence_closed_outputs() -> None:
    """Discard further output to a terminal that was closed or to a pipe that nobody reads."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    for descriptor, event in poll.poll(0):
        if event & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def end_now(reason: str, status: int = 1, *, prints: bool | None = None) -> NoReturn:
    """End the process at once, from any thread, after one line: the reason, and how to go on.

    Args:
        reason: why it ends.
        status: exit status.
        prints: whether this rank prints the line; by default the first one does.
    """
    if (is_first_rank() if prints is None else prints) and not _command.is_gone:
        _command.is_gone = True
        say(f"\n{program()}: {reason}; {_command.resume_hint()}")
    os._exit(status)


def note_failure() -> None:
    """Note that this process ends with an error that other ranks need not have."""
    _command.has_failed = True


def has_failed() -> bool:
    """Whether this process ends with an error that other ranks need not have."""
    return _command.has_failed or hasattr(sys, "last_value")  # an exception that nobody caught


def is_leaving() -> bool:
    """Whether this process was asked to end and has nothing to save."""
    return _command.asked != 0 and not _command.may_take_long


def cause_of(number: int) -> str:
    """Description of a signal in messages."""
    return _command.cause or _CAUSES.get(signal.Signals(number), signal.Signals(number).name)


def request_received() -> int:
    """0, or why this process was asked to end, as `pass_on` takes it."""
    return request_of(_command.asked)


def request_of(number: int) -> int:
    """A signal that this process has received, or 0, as `receive` and `pass_on` take it."""
    return number | (_BY_LAUNCHER if number and _command.cause else 0)


def pass_on(request: int) -> None:
    """End this process, too, for the reason that another rank has: its `request_received`."""
    if not _command.asked:
        receive(request)


def receive(request: int) -> None:
    """Send this process the signal that another one has received."""
    if request & _BY_LAUNCHER:
        _command.cause = _LAUNCHER_GONE
    os.kill(os.getpid(), number_of(request))


def number_of(request: int) -> int:
    """The signal of a request."""
    number = request & ~_BY_LAUNCHER
    return number if number in SIGNALS else signal.SIGTERM


def can_raise(frame: FrameType | None) -> bool:
    """Whether an exception raised in this frame would reach the code that called it."""
    codes = _codes(frame)
    return not any(c.co_name == "__del__" or any(part in c.co_filename for part in _UNSAFE_FILES) for c in codes)


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    """The code that is executed in a frame, and that of its callers."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _within_reach(work: Callable[[], None]) -> None:
    """Call the work of a command; an exception of the signal handler is only raised below this function."""
    work()


@contextmanager
def resume_hint(describe: Callable[[], str]) -> Iterator[None]:
    """Inside the block, and after an exception in it, an early end prints `describe()`: how to go on."""
    before, _command.resume_hint = _command.resume_hint, describe
    yield
    _command.resume_hint = before


@contextmanager
def taken_over(by: Callable[[int, FrameType | None], None], has_reacted: Callable[[], bool]) -> Iterator[None]:
    """Inside the block signals are handled by `by`, in the main thread, and may take any time to be obeyed.

    Args:
        by: a signal handler.
        has_reacted: whether the handler need not be called again.
    """
    numbers = [number for number in SIGNALS if not _stays_ignored(number)]
    before = {number: signal.signal(number, by) for number in numbers}
    state = _command.may_take_long, _command.has_reacted
    _command.may_take_long, _command.has_reacted = True, has_reacted
    try:
        yield
    finally:
        _command.may_take_long, _command.has_reacted = state
        for number, handler in before.items():
            signal.signal(number, handler)


def record(number: int) -> None:
    """Note that a signal has been obeyed: the command ends, and later signals do not disturb it."""
    _command.asked = _command.asked or number


def _stays_ignored(number: int) -> bool:
    """Whether `nohup` has made the command ignore SIGHUP."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def begin(module: str) -> None:
    """Call first in the file of a command: one OpenMP thread per process, and Ctrl-C ends it without a traceback.

    Several processes (ranks, simulators) share the cores of a machine; with two threads each they were measured to be
    many times slower than with one. For a large model with a CPU to itself, set OMP_NUM_THREADS.

    Args:
        module: `__name__` of the file; no signal handlers are installed if another program imports it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main_file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    own_program = module == "__main__" or Path(main_file).name.startswith("rlvla-")
    if not own_program:
        return
    if any(find_spec(name) is None for name in ("numpy", "torch")):
        activate = "in a checkout: source .venv/bin/activate"
        raise SystemExit(f"{program()}: this Python lacks what rlvla needs ({sys.executable}); {activate}")
    if _in_main_thread():
        _command.is_program = True
        _install()


def _install() -> dict[int, Any]:
    """Install the handlers; returns those before."""
    numbers = [n for n in SIGNALS if not _stays_ignored(n) and signal.getsignal(n) is not signal.SIG_IGN]
    return {number: signal.signal(number, _on_signal) for number in numbers}


def _on_signal(number: int, frame: FrameType | None) -> None:
    command = _command
    if command.phase is _Phase.STARTING:
        end_now(cause_of(number), SHELL_SIGNAL_BASE + number)
    if command.phase is _Phase.CLOSING or _within_reach.__code__ not in _codes(frame):
        os._exit(SHELL_SIGNAL_BASE + (command.asked or number))
    if command.asked:
        pressed_twice = command.has_raised and number == signal.SIGINT == command.asked
        if pressed_twice and time.monotonic() > command.asked_at + _TWICE_SECONDS:
            os._exit(SHELL_SIGNAL_BASE + number)
        return
    if not can_raise(frame):
        return  # it will be sent again
    command.asked, command.asked_at = number, time.monotonic()
    if is_first_rank():
        command.has_printed = True
        say(f"\n{program()}: {cause_of(number)}; {command.resume_hint()}")
    command.has_raised = True
    raise Interrupted


@contextmanager
def importing() -> Iterator[None]:
    """Inside the block a signal ends the process at once, because nothing has begun.

    An exception raised while torch is initialized would abort the process with a core dump.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _on_signal):
        yield
        return
    installed = {} if signal.getsignal(signal.SIGINT) is _on_signal else _install()
    state, _command.phase = (_command.phase, _command.resume_hint), _Phase.STARTING
    _command.resume_hint = lambda: _NOT_BEGUN
    try:
        yield
    finally:
        _command.phase, _command.resume_hint = state
        for number, handler in installed.items():
            signal.signal(number, handler)


def run_command(work: Callable[[], None], after_interrupt: str) -> None:
    """Run the work of a command; see the module's description.

    Args:
        work: the command.
        after_interrupt: outcome of running the command again, for messages.

    Raises:
        SystemExit: a signal ended it; the status is 128 + signal number, as in a shell.
    """
    if not _in_main_thread():
        work()
        return
    command = _command
    before, outer = _install(), command.resume_hint
    command.asked, command.has_raised, command.cause = 0, False, ""
    command.has_printed = command.has_failed = False
    watcher = _Watcher()
    try:
        with resume_hint(lambda: after_interrupt):
            command.phase = _Phase.RUNNING
            _within_reach(work)
    except KeyboardInterrupt:
        if not command.asked:  # raised by something else than the handler
            command.asked = signal.SIGINT
            if is_first_rank():
                print(f"\n{program()}: {_CAUSES[signal.SIGINT]}; {after_interrupt}", file=sys.stderr, flush=True)
        raise SystemExit(SHELL_SIGNAL_BASE + command.asked) from None
    except Exception:
        if not command.has_raised:
            note_failure()
            raise
        raise SystemExit(SHELL_SIGNAL_BASE + command.asked) from None  # a failure of the clean-up
    finally:
        command.phase = _Phase.CLOSING
        if not command.is_program:
            watcher.stop()
            command.phase, command.resume_hint = _Phase.STARTING, outer
            for number, handler in before.items():
                signal.signal(number, handler)


class _Watcher(threading.Thread):
    """The thread of the module's description; the interpreter writes each signal's number to its pipe."""

    def __init__(self) -> None:
        super().__init__(name="signals", daemon=True)
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._poll = select.poll()  # takes descriptors of any number, which `select.select` does not
        self._poll.register(self._reader, select.POLLIN)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._launchers: list[Ancestor] = launchers_of_this_rank()
        self._asked_at: float | None = None  # when this process was asked to end within seconds
        self._next_check = 0.0
        self._stopping = False
        self.start()

    def stop(self) -> None:
        """End the thread; called in the main thread."""
        signal.set_wakeup_fd(self._before)
        self._stopping = True
        os.write(self._writer, b"\0")
        self.join()
        os.close(self._reader)
        os.close(self._writer)

    def run(self) -> None:
        """Run until `stop` or the end of the process."""
        pending = 0
        while True:
            waiting = pending and not _command.has_reacted()
            self._poll.poll(1000 * (_REPEAT_SECONDS if waiting else _LAUNCHER_SECONDS))
            pending = self._arrived() or pending
            if self._stopping:
                return
            if pending and not _command.may_take_long:
                self._begin_to_wait()
            if pending and not _command.has_reacted() and _command.phase is _Phase.RUNNING:
                time.sleep(_REPEAT_SECONDS)
                if not _command.has_reacted():
                    os.kill(os.getpid(), pending)
            if time.monotonic() >= self._next_check:
                self._next_check = time.monotonic() + _LAUNCHER_SECONDS
                self._check_launchers()
            if self._is_overdue():
                number = pending or signal.SIGTERM
                prints = is_first_rank() and (_command.may_take_long or not _command.has_printed)
                end_now(cause_of(number), SHELL_SIGNAL_BASE + number, prints=prints)

    def _arrived(self) -> int:
        """Number of a signal that arrived and asks to end, or 0."""
        try:
            numbers = os.read(self._reader, 1024)
        except BlockingIOError:
            return 0
        return next((number for number in numbers if number in SIGNALS), 0)

    def _check_launchers(self) -> None:
        if all(launcher.is_alive() for launcher in self._launchers):
            return
        self._launchers = []
        _command.cause = _LAUNCHER_GONE
        self._begin_to_wait()
        os.kill(os.getpid(), signal.SIGTERM)

    def _begin_to_wait(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def _is_overdue(self) -> bool:
        if self._asked_at is None:
            return False
        may_clean_up = _command.may_take_long or _command.has_reacted() or _command.phase is not _Phase.RUNNING
        return time.monotonic() > self._asked_at + (_SECONDS_TO_END if may_clean_up else _SECONDS_TO_REACT)


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


class _AttemptInterrupted(BaseException):
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
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        signal.raise_signal(signal.SIGINT)  # not `before` with the frame of its arrival, whose callers may be lost


class StopSignals:
    """Records SIGTERM, SIGINT and SIGHUP until the run checks for them.

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
        with taken_over(self._handle, lambda: self.received != 0 and not self._interruptible):
            yield self

    def of_all_ranks(self, all_reduce: Callable[[dict[str, float], str], Mapping[str, float]]) -> int:
        """Number of a signal that some rank has received, or 0; all ranks call it together.

        A rank without the signal sends it to itself and prints a line: the heartbeat may be too late.

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
            raise _AttemptInterrupted

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Run `work`; a signal interrupts it at once, and the result is None. For work repeated on resume."""
        try:
            try:
                self._interruptible = True
                if self.received:
                    return None
                return work()
            finally:
                self._interruptible = False
        except _AttemptInterrupted:
            return None
        except Exception:
            time.sleep(_WORKERS_FIRST_SECONDS)
            if self.received:
                return None
            raise

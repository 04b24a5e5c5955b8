"""What all commands do alike around their own work."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rlvla.utils.errors import RunEnded
from rlvla.utils.logging import passing_note

Main = Callable[[Sequence[str] | None], None]
STARTS_ANEW = "the same command starts anew"
_AGAIN_SECONDS = 0.05
_INTERRUPTED = 128 + signal.SIGINT


def command(after_interrupt: str = STARTS_ANEW) -> Callable[[Main], Main]:
    """Decorator of a command's `main`: Ctrl-C and `RunEnded` end it with a message instead of a traceback.

    The exit status is 130 or 1. Of what all ranks know only the first one tells. Workers and unfinished files are
    cleared away on the way, as after an error.

    Args:
        after_interrupt: what the user finds when the command is given again.
    """

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> None:
            try:
                with _no_interrupt_lost():
                    main(argv)
            except KeyboardInterrupt:
                _tell(after_interrupt)
                raise SystemExit(_INTERRUPTED) from None
            except RunEnded as error:
                if error.one_rank or _is_first_rank():  # the launcher ends the other ranks
                    print(f"{Path(sys.argv[0]).name}: the run was ended: {error}", file=sys.stderr, flush=True)
                raise SystemExit(1) from None

        return run

    return decorate


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Around imports that take seconds, before anything is under way: Ctrl-C ends the process at once.

    An exception could come in the middle of torch's own start, which makes of it an abort with a core dump.
    """
    with passing_note("loading torch, transformers, deepspeed"):
        alone = threading.current_thread() is threading.main_thread()
        if not alone or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def end(number: int, frame: FrameType | None) -> None:
            _tell("nothing had begun")
            os._exit(_INTERRUPTED)

        signal.signal(signal.SIGINT, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _tell(after_interrupt: str) -> None:
    if _is_first_rank():
        print(f"\n{Path(sys.argv[0]).name}: interrupted; {after_interrupt}", file=sys.stderr, flush=True)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Interrupt again where Python drops the exception: in a finalizer or a weak reference's callback.

    h5py runs such callbacks so often that one Ctrl-C in a few would do nothing.
    """
    before = sys.unraisablehook

    def again(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        # Not at once: the exception would be raised, and dropped, in this very function.
        main_thread = threading.main_thread().ident  # a signal for it also ends what it waits for
        timer = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main_thread, signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before

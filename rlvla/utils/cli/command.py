"""What every command does around its `main`: interrupts, expected errors, heavy imports."""

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

from rlvla.utils.errors import RunEnded
from rlvla.utils.terminal import passing_note

Main = Callable[[Sequence[str] | None], None]
STARTS_ANEW = "the same command starts anew"
_INTERRUPTED = 128 + signal.SIGINT


def command(after_interrupt: str = STARTS_ANEW) -> Callable[[Main], Main]:
    """Decorator for a command's `main`: Ctrl-C and `RunEnded` end it with a message instead of a traceback.

    The exit status is 130 or 1. A message common to all ranks is printed by the first one only. Workers are stopped and
    unfinished files removed on the way out, as after an error.

    Args:
        after_interrupt: what happens when the command is run again; part of the message after Ctrl-C.
    """

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> None:
            try:
                main(argv)
            except KeyboardInterrupt:
                _print_interrupted(after_interrupt)
                raise SystemExit(_INTERRUPTED) from None
            except RunEnded as error:
                if error.one_rank or _is_first_rank():  # the launcher ends the other ranks
                    print(f"{Path(sys.argv[0]).name}: the run was ended: {error}", file=sys.stderr, flush=True)
                raise SystemExit(1) from None

        return run

    return decorate


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Wrap imports that take seconds: inside the block Ctrl-C ends the process at once.

    An exception raised during torch's initialization would abort the process with a core dump.
    """
    with passing_note("loading torch, transformers, deepspeed"):
        alone = threading.current_thread() is threading.main_thread()
        if not alone or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def end(number: int, frame: FrameType | None) -> None:
            _print_interrupted("nothing had begun")
            os._exit(_INTERRUPTED)

        signal.signal(signal.SIGINT, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _print_interrupted(after_interrupt: str) -> None:
    if _is_first_rank():
        print(f"\n{Path(sys.argv[0]).name}: interrupted; {after_interrupt}", file=sys.stderr, flush=True)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"

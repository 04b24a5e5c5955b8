"""The frame of every command's `main`: interrupts, expected errors, heavy imports."""

from __future__ import annotations

import errno
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rlvla.utils.cli.flags import fail
from rlvla.utils.cli.programs import as_installed
from rlvla.utils.errors import ConfigError, MissingExtraError, RunEnded
from rlvla.utils.files import is_full
from rlvla.utils.signals import end_now, importing, is_first_rank, note_failure, program, run_command
from rlvla.utils.terminal import fit, passing_note

Main = Callable[[Sequence[str] | None], None]
STARTS_OVER = "the same command starts over"
_OTHER_REPORT_SECONDS = 3.0
_MANY_MODULES = 500  # of imports that take seconds; not of what they leave for later


def command(after_interrupt: str = STARTS_OVER) -> Callable[[Main], Main]:
    """Decorator for a command's `main`: signals, configuration errors and `RunEnded` end it with a message.

    The exit status is 128 + signal number, 2 for a configuration error, or 1. A message common to all ranks is printed
    by the first one only. Workers are stopped and unfinished files removed on the way out, as after an error.

    Args:
        after_interrupt: outcome of running the command again; part of the message after Ctrl-C.
    """

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> None:
            run_command(lambda: _run(main, argv), after_interrupt)

        return run

    return decorate


def _run(main: Main, argv: Sequence[str] | None) -> None:
    try:
        main(argv)
    except (ConfigError, MissingExtraError) as error:
        fail(program(), error)
    except RunEnded as error:
        if error.one_rank:
            note_failure()
        if error.one_rank or is_first_rank():  # the launcher ends the other ranks
            text = as_installed(f"{program()}: the run was ended: {error}")
            print(fit(text, sys.stderr), file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except Exception as error:
        if is_full(error) or (isinstance(error, OSError) and error.errno == errno.EROFS):
            note_failure()
            text = str(error)
            if isinstance(error, OSError) and error.strerror:
                text = error.strerror + (f" ({error.filename})" if error.filename else "")
            print(f"{program()}: the run was ended: {text}", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
        names = {kind.__name__ for kind in type(error).__mro__}
        rank_lost = "DistError" in names or "gloo/" in str(error)  # of a collective operation
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not rank_lost:
            raise
        time.sleep(_OTHER_REPORT_SECONDS)  # the heartbeat, the launcher or the failed rank may report more
        end_now("another rank has ended")


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Wrap imports that take seconds: a note is shown, and Ctrl-C ends the process at once.

    The imported objects are excluded from garbage collection for good, which would traverse them again and again.
    """
    before, collects = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        with passing_note("loading torch, transformers, deepspeed"), importing():
            yield
    finally:
        if len(sys.modules) > before + _MANY_MODULES:
            gc.freeze()
        if collects:
            gc.enable()

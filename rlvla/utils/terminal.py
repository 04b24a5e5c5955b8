"""Terminal output: log messages, progress bars, tables."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlvla.utils.ending import silence_closed_outputs

LOG_LEVELS = ("debug", "info", "warning", "error")
log = logging.getLogger("rlvla")
_quiet = False
_LOG_SECONDS = 30.0  # between two lines of progress where standard error is not a terminal
# Markdown's special characters. Underscores are plain inside a word, brackets unless they make a link.
_MARKUP = re.compile(r"[\\`*|~$]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])")
_CLEAR_LINE = "\r\x1b[K"
log.propagate = False


class _StandardOutput(logging.Handler):
    """Prints messages to the current `sys.stdout`; warnings and errors go to `sys.stderr`, prefixed by their level."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        try:
            if record.levelno >= logging.WARNING:
                print(f"{record.levelname.lower()}: {text}", file=sys.stderr, flush=True)
            else:
                print(text, flush=True)
        except OSError:  # the terminal was closed, or the disk with the log file is full: the run goes on
            silence_closed_outputs()


log.addHandler(_StandardOutput())


log.setLevel(logging.INFO)


def set_output(level: str = "info", *, quiet: bool = False) -> None:
    """Set the verbosity; `quiet` turns off progress bars and per-iteration lines, but not results and warnings."""
    global _quiet
    _quiet = quiet
    log.setLevel(logging.WARNING if quiet else level.upper())


def is_quiet() -> bool:
    """Whether only results, warnings and errors are shown (`--quiet`)."""
    return _quiet


def quiet_libraries() -> None:
    """Silence the info and warning messages of the libraries in use; errors are still shown."""
    for name in ("deepspeed", "DeepSpeed", "transformers", "accelerate", "robosuite_logs", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def progress_bar(total: int, description: str, *, enabled: bool = True, unit: str = "episode", initial: int = 0) -> Any:
    """A tqdm bar on standard error; none if disabled (on all ranks but the main one) or with --quiet.

    If standard error is not a terminal, a line of progress is printed now and then instead.

    Args:
        total: units to do in all.
        description: shown in front of the bar.
        enabled: False on all ranks but the main one.
        unit: what is counted.
        initial: units done before this call (a resumed job); they do not count towards the speed.
    """
    from tqdm import tqdm

    options: dict[str, Any] = {"total": total, "desc": description, "unit": unit, "initial": initial, "leave": False}
    options["disable"] = not enabled or _quiet
    if sys.stderr.isatty():
        return tqdm(**options, mininterval=0.2, dynamic_ncols=True)
    return tqdm(**options, file=_LogLines(), delay=_LOG_SECONDS, mininterval=_LOG_SECONDS, ncols=0)


class _LogLines(io.StringIO):
    """Prints each state of a bar on a line of its own, where tqdm would overwrite the previous one."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)
        return len(text)


@contextmanager
def passing_note(text: str) -> Iterator[None]:
    """Show a note on the terminal for the duration of the block.

    Nothing is shown on ranks other than the first, with --quiet, or if standard error is not a terminal.
    """
    shown = sys.stderr.isatty() and not _quiet and os.environ.get("RANK", "0") == "0"
    if shown:
        print(f"\r{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as a plain-text table; columns of numbers are right-aligned."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(h), *(len(row[i]) for row in cells)) if cells else len(h) for i, h in enumerate(headers)]
    numeric = [all(_is_number(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric)).rstrip()

    return "\n".join([line(headers), "  ".join("-" * w for w in widths), *(line(row) for row in cells)])


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as a Markdown table; cells are plain text, see `markdown_text`."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(markdown_text(cell) for cell in line) + " |" for line in lines)


def markdown_text(value: Any) -> str:
    """A value as plain text in Markdown, on one line: names cannot add markup, HTML, links or cells of a table."""
    text = one_line(value)
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(char, entity)
    return _MARKUP.sub(r"\\\g<0>", text)


def one_line(value: Any) -> str:
    """A value as text without line breaks and other control characters (spaces instead) and without lone surrogates."""
    kinds = {"Cc": " ", "Zl": " ", "Zp": " ", "Cs": "?"}
    return "".join(kinds.get(unicodedata.category(char), char) for char in str(value))


def _is_number(text: str) -> bool:
    return text.strip("%+-.0123456789 []e,").strip() == ""


def duration(seconds: float) -> str:
    """Format seconds, e.g. `95.2` -> `1m35s`."""
    seconds = round(seconds)
    hours, rest = divmod(seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def count(number: float) -> str:
    """Format a large number, e.g. `1234567` -> `1.2 M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"

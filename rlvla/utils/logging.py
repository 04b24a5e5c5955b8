"""What a person sees in a terminal: progress bars, tables, messages by level. Metrics of a run are read here, too."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
LEVELS = ("debug", "info", "warning", "error")
log = logging.getLogger("rlvla")
_quiet = False
# How a log file hears of what takes longer than this.
_LOG_SECONDS = 30.0
_CLEAR_LINE = "\r\x1b[K"


class _StandardOutput(logging.Handler):
    """Writes plain messages to what `sys.stdout` is now; warnings and errors go to `sys.stderr` with their level."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            print(f"{record.levelname.lower()}: {text}", file=sys.stderr, flush=True)
        else:
            print(text, flush=True)


log.addHandler(_StandardOutput())
log.setLevel(logging.INFO)
log.propagate = False


def set_output(level: str = "info", *, quiet: bool = False) -> None:
    """Choose how much is said: `quiet` leaves out progress bars and lines per iteration, not results and warnings."""
    global _quiet
    _quiet = quiet
    log.setLevel(logging.WARNING if quiet else level.upper())


def is_quiet() -> bool:
    """Whether results, warnings and errors only are wanted (`--quiet`)."""
    return _quiet


def quiet_libraries() -> None:
    """Keep libraries' chatter out of the terminal; warnings and errors still show."""
    for name in ("deepspeed", "DeepSpeed", "transformers", "accelerate", "robosuite_logs", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def open_lines(path: Path) -> Any:
    """A text file to which lines are appended; a torn last line, which a kill may leave, does not swallow the next."""
    file = path.open("a+", encoding="utf-8")
    if file.tell():
        with path.open("rb") as before:
            before.seek(-1, os.SEEK_END)
            if before.read(1) != b"\n":
                file.write("\n")
    return file


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of `metrics.jsonl`; where a step was logged twice (a resumed run), the later one.

    Torn lines, which a kill or a full disk leaves, are passed over.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    by_step: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        by_step.setdefault(record["step"], {}).update(record)
    return [by_step[step] for step in sorted(by_step)]


def progress_bar(total: int, description: str, *, enabled: bool = True, unit: str = "episode", initial: int = 0) -> Any:
    """A tqdm bar on standard error; silent when disabled (ranks other than the main one) or with --quiet.

    Where standard error is no terminal, no bar is drawn: what takes long says in a line of its own how far it has come.

    `initial` of the total have been done before; the speed is that of the others.
    """
    from tqdm import tqdm

    options: dict[str, Any] = {"total": total, "desc": description, "unit": unit, "initial": initial, "leave": False}
    options["disable"] = not enabled or _quiet
    if sys.stderr.isatty():
        return tqdm(**options, mininterval=0.2, dynamic_ncols=True)
    return tqdm(**options, file=_LogLines(), delay=_LOG_SECONDS, mininterval=_LOG_SECONDS, ncols=0)


class _LogLines(io.StringIO):
    """Makes a line of every state of a bar, which tqdm would write over the one before."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)
        return len(text)


@contextmanager
def passing_note(text: str) -> Iterator[None]:
    """A line on the terminal for the time of the block: what is done where there is no bar.

    Nothing on ranks other than the first, with --quiet, or where standard error is no terminal.
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
    """A plain text table; numbers are right-aligned."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(h), *(len(row[i]) for row in cells)) if cells else len(h) for i, h in enumerate(headers)]
    numeric = [all(_is_number(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric)).rstrip()

    return "\n".join([line(headers), "  ".join("-" * w for w in widths), *(line(row) for row in cells)])


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The same as a Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines)


def _is_number(text: str) -> bool:
    return text.strip("%+-.0123456789 []e,").strip() == ""


def duration(seconds: float) -> str:
    """`95.2` -> `1m35s`."""
    seconds = round(seconds)
    hours, rest = divmod(seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"

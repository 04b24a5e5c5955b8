"""Terminal output: log messages fitted to its width, colors, tables. Progress bars: `rlvla.utils.bars`."""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from rlvla.utils.cli.programs import as_installed
from rlvla.utils.signals import silence_closed_outputs

SUMMARY = "summary"  # key of the JSON files of stages that choose by measurements
IN_RECIPE = "RLVLA_IN_RECIPE"  # in the environment of commands that a recipe runs
LOG_LEVELS = ("debug", "info", "warning", "error")
log = logging.getLogger("rlvla")
_quiet = False
# Markdown's special characters. Underscores are plain inside a word, brackets unless they make a link.
_MARKUP = re.compile(r"[\\`*|~$]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])")
_CLEAR_LINE = "\r\x1b[K"
_CODE = re.compile(r"\r?\x1b\[[0-9;?]*[@-~]")  # style, or what clears a line
_STYLES = {"bold": 1, "red": 31, "yellow": 33, "cyan": 36}
_COMMAND = re.compile(r"(?:^ *|: )(python|deepspeed|tensorboard|rlvla-\S+) .*--\w")  # ends a line; to be copied
_BEFORE_FLAG = re.compile(r""" (?=--\w)(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""")  # not inside quotes
_GAP = re.compile(r"\S {2,}(?=\S)")  # two of them make a row of a table
_LABEL = re.compile(r"^ *\S+ {2,}| *")  # what later lines of a long line are indented by
_BEFORE_FIGURE = re.compile(r"(?<=[A-Za-z]) (?=[-+]?\d)")
_COLUMNS = 80  # where the width is unknown
_TIED = "\xa0"  # a space at which no line is broken
log.propagate = False


class _StandardOutput(logging.Handler):
    """Prints messages to the current `sys.stdout`; warnings and errors go to `sys.stderr`, prefixed by their level."""

    def emit(self, record: logging.LogRecord) -> None:
        text, level = as_installed(record.getMessage()), record.levelname.lower()
        try:
            with _bars_out_of_the_way():
                if record.levelno >= logging.WARNING:
                    color = "red" if record.levelno >= logging.ERROR else "yellow"
                    text = fit(f"{level}: {text}", sys.stderr).removeprefix(level)
                    print(f"{style(level, color, sys.stderr)}{text}", file=sys.stderr, flush=True)
                else:
                    print(fit(text), flush=True)
        except OSError:  # the terminal was closed, or the disk with the log file is full: the run goes on
            silence_closed_outputs()


def _bars_out_of_the_way() -> AbstractContextManager[None]:
    """Hide progress bars inside the block, so that a message starts at the beginning of a line."""
    tqdm = sys.modules.get("tqdm")
    return nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=sys.stderr)


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


@contextmanager
def passing_note(text: str) -> Iterator[None]:
    """Show a note on the terminal for the duration of the block.

    Nothing is shown on ranks other than the first, with --quiet, or if standard error is not a terminal that can clear
    a line.
    """
    shown = _takes_codes(sys.stderr) and not _quiet and os.environ.get("RANK", "0") == "0"
    if shown:
        width = max(1, columns(sys.stderr) - len(" ... "))
        text = textwrap.shorten(text, width, placeholder="")  # one line can be cleared
        print(f"\r{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)


def _takes_codes(stream: TextIO) -> bool:
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def columns(stream: TextIO | None = None) -> int:
    """Width of a terminal in characters; 80 if it is unknown."""
    with suppress(ValueError, OSError):  # a stream that is no file, or no terminal
        asked = int(os.environ.get("COLUMNS") or 0)
        return asked or os.get_terminal_size((stream or sys.stdout).fileno()).columns or _COLUMNS
    return _COLUMNS


def style(text: str, name: str, stream: TextIO | None = None) -> str:
    """The text in a style (bold, red, yellow, cyan) if `stream` (standard output) is a terminal that takes colors."""
    plain = os.environ.get("NO_COLOR") or not _takes_codes(stream or sys.stdout)
    return text if plain else f"\x1b[{_STYLES[name]}m{text}\x1b[0m"


def without_codes(text: str) -> str:
    """The text without terminal codes (`style`)."""
    return _CODE.sub("", text)


def fit(text: str, stream: TextIO | None = None) -> str:
    """The text for a terminal: long lines are broken between words, not before a figure, and commands as in a script.

    Args:
        text: one or more lines.
        stream: output stream (default: standard output); unless it is a terminal, the text stays as it is. Tables
            always do.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        return text
    width = columns(stream)
    return "\n".join(_broken(line, width) for line in text.split("\n"))


def show(text: str) -> None:
    """Print results, fitted to the terminal; commands in it are those that can be called here."""
    put(fit(as_installed(text)))


def page_words(name: str, path: Path) -> str:
    """Path and URL of an HTML page; the URL ends its line, so that terminals make it a link."""
    return f"{name}: {path}\nopen: {path.resolve().as_uri()}"


def suggest(command: str) -> None:
    """Show the command to run next; not inside a recipe, which runs the next stage itself."""
    if IN_RECIPE not in os.environ:
        show(f"next: {command}")


def put(text: str) -> None:
    """Print; a closed output, as with `| head`, is ignored."""
    try:
        print(text, flush=True)
    except OSError:
        silence_closed_outputs()


def _broken(line: str, width: int) -> str:
    if len(line) <= width or len(_GAP.findall(line)) > 1:
        return line
    if _COMMAND.search(line):
        return "\n".join(fold_command(line, width))
    label = _LABEL.match(line)
    indent = len(label[0]) if label and label[0].strip() else len(line) - len(line.lstrip()) + 2
    tied = _BEFORE_FIGURE.sub(_TIED, line)
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(tied, width, subsequent_indent=" " * indent, **options).replace(_TIED, " ")


def fold_command(command: str, width: int) -> list[str]:
    """A command in lines, each of which ends before a flag with the shell's mark of continuation."""
    indent = " " * (len(command) - len(command.lstrip()) + 2)
    lines = [""]
    for piece in _BEFORE_FLAG.split(command):
        if lines[-1] and len(f"{lines[-1]} {piece} \\") > width:
            lines[-1] += " \\"
            lines.append(indent + piece)
        else:
            lines[-1] += f" {piece}" if lines[-1] else piece
    return lines


def header(title: str, rows: Mapping[str, str]) -> str:
    """Summary shown before a run starts: a title, and a line per fact."""
    widest = max(map(len, rows))
    return "\n".join([style(title, "bold"), *(f"  {name:<{widest}}  {text}" for name, text in rows.items())])


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as a plain-text table; columns of numbers are right-aligned."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(h), *(len(row[i]) for row in cells)) if cells else len(h) for i, h in enumerate(headers)]
    numeric = [all(not row[i].strip("%+-.0123456789 []e,") for row in cells) for i in range(len(headers))]

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


def printable(text: str, limit: int = 200) -> str:
    """The first `limit` characters of a foreign text on one line, safe for terminals and logs."""
    line = " ".join(text[: 4 * limit].split())
    return "".join(c if c.isprintable() else "?" for c in line[:limit])


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

"""Progress bars on a terminal, and lines of progress where there is none."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from rlvla.utils.terminal import duration, is_quiet

_LOG_SECONDS = 30.0  # between two lines of progress where standard error is not a terminal
_LONGEST_LINE = 1000  # characters of such a line
_run_left: Callable[[], float | None] | None = None


@contextmanager
def part_of_run(left: Callable[[], float | None]) -> Iterator[None]:
    """Inside the block bars also show `left()`: seconds until the whole run is over, if known."""
    global _run_left
    before, _run_left = _run_left, left
    try:
        yield
    finally:
        _run_left = before


class Bar(tqdm):
    """A tqdm bar with its figures in front; the bar itself fills the rest of the line."""

    @property
    def format_dict(self) -> dict[str, Any]:
        """The fields of `bar_format`, with `figures`: count, speed, remaining times."""
        facts = super().format_dict
        done, total, elapsed = facts["n"], facts["total"], facts["elapsed"]
        new = done - facts["initial"]
        rate = facts["rate"] or (new / elapsed if new and elapsed else 0.0)
        figures = [f"{done}/{total}"]
        if rate:
            figures.append(f"{_three_digits(rate)}/s" if rate >= 1 else f"{_three_digits(1 / rate)} s each")
        if self.postfix:
            figures.append(self.postfix)
        rest = (total - done) / rate if rate else 0.0
        run = (_run_left() if _run_left is not None else None) or 0.0
        figures += [f"{prefix}{duration(s)} left" for prefix, s in (("", rest), ("run ", run)) if round(s)]
        return facts | {"figures": ", ".join(figures)}


def _three_digits(number: float) -> str:
    """Three significant digits, at a fixed width: 9.50, 14.0, 157, 1570."""
    return f"{number:#.3g}".removesuffix(".") if number < 999.5 else f"{number:.0f}"


def progress_bar(total: int, description: str, *, enabled: bool = True, initial: int = 0) -> Any:
    """A bar on standard error; none if disabled (on all ranks but the main one) or with --quiet.

    If standard error is not a terminal, a line of progress is printed now and then instead.

    Args:
        total: units to do in all.
        description: shown in front of the bar.
        enabled: False on all ranks but the main one.
        initial: units done before this call (a resumed job); they do not count towards the speed.
    """
    options: dict[str, Any] = {"total": total, "desc": description, "initial": initial, "leave": False, "miniters": 1}
    options |= {"disable": not enabled or is_quiet(), "bar_format": "{desc}: {figures}"}
    if not sys.stderr.isatty():
        return Bar(**options, file=_LogLines(), delay=_LOG_SECONDS, mininterval=_LOG_SECONDS, ncols=_LONGEST_LINE)
    options["bar_format"] += " {bar}"
    return Bar(**options, mininterval=0.2, dynamic_ncols=True)


class _LogLines(io.StringIO):
    """Prints each state of a bar on a new line, where tqdm would overwrite the previous one."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)
        return len(text)

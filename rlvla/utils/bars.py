"""Progress bars on a terminal, and lines of progress where there is none."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from rlvla.utils.terminal import duration, is_quiet

_LOG_SECONDS = 30.0  # between two lines of progress where standard error is not a terminal


class Bar(tqdm):
    """A tqdm bar whose figures come before the bar itself, which takes the room that is left.

    Args:
        left: returns the seconds until the whole run, of which the bar shows a part, is over; None: unknown.
        options: those of tqdm.
    """

    def __init__(self, left: Callable[[], float | None], **options: Any):
        self._left = left
        super().__init__(**options)

    @property
    def format_dict(self) -> dict[str, Any]:
        """What `bar_format` can show."""
        facts = super().format_dict
        done, total, elapsed = facts["n"], facts["total"], facts["elapsed"]
        new = done - facts["initial"]
        rate = facts["rate"] or (new / elapsed if new and elapsed else 0.0)
        figures = [f"{done}/{total}"]
        if rate:
            figures.append(f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each")
        if self.postfix:
            figures.append(self.postfix)
        if rate and done < total:
            figures.append(f"{duration((total - done) / rate)} left")
        run = self._left()
        if run is not None:
            figures.append(f"run {duration(run)} left")
        return facts | {"figures": ", ".join(figures)}


def progress_bar(
    total: int,
    description: str,
    *,
    enabled: bool = True,
    initial: int = 0,
    left: Callable[[], float | None] = lambda: None,
) -> Any:
    """A bar on standard error; none if disabled (on all ranks but the main one) or with --quiet.

    If standard error is not a terminal, a line of progress is printed now and then instead.

    Args:
        total: units to do in all.
        description: shown in front of the bar.
        enabled: False on all ranks but the main one.
        initial: units done before this call (a resumed job); they do not count towards the speed.
        left: see `Bar`.
    """
    options: dict[str, Any] = {"total": total, "desc": description, "initial": initial, "leave": False}
    options |= {"left": left, "disable": not enabled or is_quiet(), "bar_format": "{desc}: {figures}"}
    if not sys.stderr.isatty():
        return Bar(**options, file=_LogLines(), delay=_LOG_SECONDS, mininterval=_LOG_SECONDS, ncols=0)
    options["bar_format"] += " {bar}"
    return Bar(**options, mininterval=0.2, dynamic_ncols=True)


class _LogLines(io.StringIO):
    """Prints each state of a bar on a line of its own, where tqdm would overwrite the previous one."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)
        return len(text)

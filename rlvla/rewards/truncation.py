"""Dynamic truncation of episodes that make no progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass
class _Course:
    """Progress of an episode according to one source.

    Attributes:
        best: best progress so far, ignoring gains below the minimum.
        last: step of the last measurement.
        waited: measured steps since `best`.
    """

    best: float
    last: int
    waited: int = 0


class ProgressWatch:
    """Detects that no source has measured progress in an episode for `patience` steps.

    Only measured steps count, so that late answers do not make an episode look stalled. A source at progress 1 never
    counts as waiting.

    Args:
        patience: environment steps without progress before the episode counts as stalled.
        min_gain: smallest gain over the best progress so far that counts.
    """

    def __init__(self, patience: int, min_gain: float):
        self._patience, self._min_gain = patience, min_gain
        self._courses: dict[str, _Course] = {}
        self._steps = 0

    def step(self, progress: Mapping[str, float | None]) -> None:
        """Advance one step, with the progress that each source measures after it; None if not measured."""
        self._steps += 1
        for source, value in progress.items():
            if value is not None:
                self._measured(source, self._steps, value)
            elif source in self._courses:
                self._courses[source].last = self._steps  # an unmeasured step does not count

    def answered(self, source: str, measurements: Sequence[tuple[int, float]]) -> None:
        """Late measurements of a source: (number of executed steps, progress then), in order of the steps.

        One that arrives after a measurement of a later step is ignored.
        """
        for steps, value in measurements:
            self._measured(source, steps, value)

    def _measured(self, source: str, steps: int, value: float) -> None:
        course = self._courses.setdefault(source, _Course(value, steps))
        if steps <= course.last:
            return
        course.waited, course.last = course.waited + steps - course.last, steps
        if value >= min(1.0, course.best + self._min_gain - 1e-9):
            course.best, course.waited = value, 0

    @property
    def stalled(self) -> bool:
        """No source that has measured progress saw any for `patience` steps."""
        waited = [course.waited for course in self._courses.values()]
        return bool(waited) and min(waited) >= self._patience

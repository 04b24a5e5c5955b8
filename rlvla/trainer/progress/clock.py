"""The time that a run still needs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_RECENT = 20  # iterations whose mean duration is expected of the next ones


class RunClock:
    """Estimates the time left of a run from the iterations and evaluations so far.

    Args:
        iterations: number of iterations of the run.
        eval_steps: iterations between two evaluations, 0 for none before the end.
        now: clock in seconds.
    """

    def __init__(self, iterations: int, eval_steps: int, now: Callable[[], float] = time.monotonic):
        self._iterations, self._eval_steps, self._now = iterations, eval_steps, now
        self._recent: deque[float] = deque(maxlen=max(_RECENT, eval_steps))
        self._evaluation = 0.0
        self._mark: float | None = None  # end of the last iteration or evaluation
        self._between = 0.0  # seconds that neither took (checkpoints), since the first iteration
        self._measured = 0
        self._evaluating = self._last = False

    def iteration(self, seconds: float) -> None:
        """An iteration has just ended."""
        self._note(seconds)
        if self._measured == 1 and len(self._recent) == 1:
            self._recent.clear()  # the first one includes what happens only once
        self._recent.append(seconds)
        self._measured += 1

    def begin_evaluation(self, *, last: bool = False) -> None:
        """An evaluation begins; `last`: the run ends with it, be it before its last iteration."""
        self._evaluating, self._last = True, last

    def evaluation(self, seconds: float) -> None:
        """An evaluation has just ended."""
        self._note(seconds)
        self._evaluation, self._evaluating = seconds, False

    def _note(self, seconds: float) -> None:
        now = self._now()
        if self._mark is not None and self._measured:
            self._between += max(0.0, now - self._mark - seconds)
        self._mark = now

    def left(self, done: int) -> float | None:
        """Seconds until the end of the run after `done` iterations; None before any was measured."""
        if not self._measured:
            return None
        rest = self._iterations - done
        each = sum(self._recent) / len(self._recent) + self._between / self._measured
        evaluations = 1 + self._between_ends(done) if rest >= 0 else 0
        return rest * each + evaluations * self._evaluation

    def countdown(self, done: int) -> float | None:
        """As `left`, less the time since the end of the last iteration or evaluation."""
        left = self.left(done)
        if left is None or self._mark is None:
            return None
        under_way = self._evaluation if self._evaluating else 0.0
        return max(0.0, under_way + (0.0 if self._last else left) - (self._now() - self._mark))

    def _between_ends(self, done: int) -> int:
        """Evaluations due after `done` iterations and before the last one."""
        steps = self._eval_steps
        return (self._iterations - 1) // steps - done // steps if steps and done < self._iterations else 0

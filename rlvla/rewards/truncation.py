"""Dynamic truncation of episodes that make no progress."""

from __future__ import annotations

from collections.abc import Sequence


class ProgressWatch:
    """Detects that an episode has made no progress for `patience` steps.

    Args:
        patience: environment steps without progress before the episode counts as stalled.
        min_gain: smallest gain over the best progress so far that counts.
    """

    def __init__(self, patience: int, min_gain: float):
        self._patience, self._min_gain = patience, min_gain
        self._best: float | None = None
        self._waited = 0

    def step(self, progress: Sequence[float | None]) -> None:
        """Update with the progress reported by each source after a step; None if unknown."""
        known = [p for p in progress if p is not None]
        if not known:
            return  # progress is still being computed: do not count the step
        self._waited += 1
        if self._best is None or max(known) >= self._best + self._min_gain - 1e-9:
            self._best, self._waited = max(known), 0

    @property
    def stalled(self) -> bool:
        """No progress for `patience` steps."""
        return self._waited >= self._patience

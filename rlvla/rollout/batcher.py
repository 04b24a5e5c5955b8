"""Which waiting episodes the policy answers together, and when."""

from __future__ import annotations

from collections import deque


class Batcher:
    """Collects waiting episodes until a batch is due.

    A batch is due when it is worth a forward pass, when its oldest member has waited long enough, or when nobody is
    left who could still join it. Whoever waits by then goes with it.

    Args:
        max_batch: largest batch.
        max_wait_s: seconds for which a batch that is not yet worth it waits.
        worth: size from which on a batch waits for nobody; default `max_batch`.
    """

    def __init__(self, max_batch: int, max_wait_s: float, worth: int | None = None):
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._worth = max_batch if worth is None else worth
        self._waiting: deque[tuple[int, float]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, worker: int, now: float) -> None:
        """The episode of a worker waits from now on (seconds of any clock that does not go back)."""
        self._waiting.append((worker, now))

    def take(self, now: float, others: int) -> list[int]:
        """The workers of the batch that is due, the longest waiting first; empty if none is.

        Args:
            now: the time.
            others: episodes under way that do not wait yet.
        """
        if not self._waiting:
            return []
        worth, alone = len(self._waiting) >= self._worth, others == 0
        if not (worth or alone or now - self._waiting[0][1] >= self._max_wait_s):
            return []
        return [self._waiting.popleft()[0] for _ in range(min(self._max_batch, len(self._waiting)))]

    def patience(self, now: float) -> float | None:
        """Seconds until a batch is due whatever happens; None if nobody waits."""
        return max(0.0, self._waiting[0][1] + self._max_wait_s - now) if self._waiting else None

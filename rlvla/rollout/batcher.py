"""Groups waiting episodes into batches for the policy."""

from __future__ import annotations

from collections import deque


class Batcher:
    """Collects waiting episodes until a batch is due.

    A batch is due when it reaches the target size, when its oldest episode has waited for `max_wait_s`, or when no
    other episode could still join it.

    Args:
        max_batch: maximum batch size.
        max_wait_s: seconds an episode waits at most for its batch to reach the target size.
        target: size from which a batch is due at once; default `max_batch`.
    """

    def __init__(self, max_batch: int, max_wait_s: float, target: int | None = None):
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._target = max_batch if target is None else target
        self._waiting: deque[tuple[int, float]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, slot: int, now: float) -> None:
        """Queue the episode of a slot; `now` is in seconds of a monotonic clock."""
        self._waiting.append((slot, now))

    def take(self, now: float, others: int) -> list[int]:
        """Slots of the batch that is due, longest waiting first; empty if none is due.

        Args:
            now: current time, same clock as in `add`.
            others: number of running episodes that are not waiting.
        """
        if not self._waiting:
            return []
        full, alone = len(self._waiting) >= self._target, others == 0
        if not (full or alone or now - self._waiting[0][1] >= self._max_wait_s):
            return []
        return [self._waiting.popleft()[0] for _ in range(min(self._max_batch, len(self._waiting)))]

    def time_until_due(self, now: float) -> float | None:
        """Seconds until a batch is due at the latest; None if no episode is waiting."""
        return max(0.0, self._waiting[0][1] + self._max_wait_s - now) if self._waiting else None

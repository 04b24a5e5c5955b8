"""Stand-ins for the collectives of several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable


class OneRank:
    world_size, rank = 1, 0

    def __init__(self, rank: int = 0):
        self.rank = rank

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        pass

    def all_reduce(self, values, op="mean"):
        return dict(values)

    def gather_objects(self, item):
        return [item]


class ManyRanks:
    """Threads that meet in every collective."""

    def __init__(self, size: int):
        self._slots = [None] * size
        self._barrier = threading.Barrier(size)
        self._arrived: Callable[[int], object] = lambda rank: None

    def on_arrival(self, arrived: Callable[[int], object]) -> None:
        """Call `arrived(rank)` whenever a rank comes to a collective, before it waits for the others."""
        self._arrived = arrived

    def of(self, rank: int) -> OneRank:
        owner = self

        class Rank(OneRank):
            world_size = len(owner._slots)

            def barrier(self):
                owner._arrived(self.rank)
                owner._barrier.wait()

            def gather_objects(self, item):
                owner._slots[self.rank] = item
                self.barrier()
                gathered = list(owner._slots)
                owner._barrier.wait()
                return gathered

            def all_reduce(self, values, op="mean"):
                parts = self.gather_objects(dict(values))
                return {name: {"max": max, "sum": sum}[op](part[name] for part in parts) for name in values}

        return Rank(rank)

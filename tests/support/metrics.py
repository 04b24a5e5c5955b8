"""Metrics reduced over stand-ins of ranks."""

from __future__ import annotations

import threading

from rlvla.trainer.metrics import Metrics


class Ranks:
    """Threads that reduce together, one strategy for each."""

    def __init__(self, size: int):
        self._size, self._barrier = size, threading.Barrier(size)
        self._passed: list[dict[str, float]] = [{}] * size

    def reduce(self, parts: list[Metrics]) -> list[dict[str, float]]:
        results: list[dict[str, float]] = [{}] * self._size

        def run(rank: int) -> None:
            results[rank] = parts[rank].reduce(Rank(self, rank))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Rank:
    def __init__(self, ranks: Ranks, rank: int):
        self._ranks, self._rank = ranks, rank

    def all_reduce(self, values: dict[str, float], op: str) -> dict[str, float]:
        ranks = self._ranks
        ranks._passed[self._rank] = dict(values)
        ranks._barrier.wait()
        assert all(list(other) == list(values) for other in ranks._passed), "every rank passes equal names in order"
        kind = {"sum": sum, "max": max, "min": min}[op]
        reduced = {name: kind(other[name] for other in ranks._passed) for name in values}
        ranks._barrier.wait()
        return reduced


def reduced(*parts: Metrics) -> dict[str, float]:
    results = Ranks(len(parts)).reduce(list(parts))
    assert all(result == results[0] for result in results)
    return results[0]

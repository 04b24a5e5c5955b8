"""Episodes counted over all ranks."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from rlvla.utils.deepspeed import strategy
from rlvla.utils.deepspeed.strategy import Tally


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Of a process group; what the module knows is forgotten afterwards."""
    monkeypatch.setattr(strategy, "_tally_store", None)
    monkeypatch.setattr(strategy, "_tally_number", itertools.count())
    return dist.TCPStore("127.0.0.1", 0, 1, True)


def rank_tallies(monkeypatch: pytest.MonkeyPatch, ranks: int) -> list[Tally]:
    """The next tally of each rank, as if each counted its tallies in a process of its own."""
    number = next(strategy._tally_number)
    made = []
    for _ in range(ranks):
        monkeypatch.setattr(strategy, "_tally_number", itertools.count(number))
        made.append(Tally())
    return made


def test_every_rank_sees_the_episodes_of_all(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy.share_tallies(store)
    first, second = rank_tallies(monkeypatch, 2)
    assert [first.add(True), second.add(False), second.add(True), first.add(False)] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    for _ in range(3):  # later ones begin at 0, and those no longer in use are forgotten
        assert [each.add(True) for each in rank_tallies(monkeypatch, 2)] == [(1, 1), (2, 2)]
    assert store.num_keys() <= 4


def test_a_rank_without_a_store_counts_for_itself(store: dist.Store) -> None:
    counted = [Tally(), Tally()]
    assert [each.add(success) for each, success in zip(counted * 2, (True, False, False, False))] == [
        *((1, 1), (1, 0)),
        *((2, 1), (2, 0)),
    ]


def test_a_lost_rank_is_left_to_the_collective_operations(store: dist.Store) -> None:
    class Lost:
        def add(self, *_: object) -> int:
            raise dist.DistNetworkError("connection reset")

        delete_key = add

    strategy._tally_store = Lost()
    counted = [Tally(), Tally(), Tally()]
    assert counted[-1].add(True) == (1, 1)

"""The sum tree against cumulative sums."""

from __future__ import annotations

import numpy as np
import pytest

from rlvla.replay.sum_tree import SumTree


def filled(priorities: list[float]) -> SumTree:
    tree = SumTree(len(priorities))
    tree.set(np.arange(len(priorities)), priorities)
    return tree


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 8, 9, 100])
def test_find_agrees_with_a_search_in_the_cumulative_sum(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    priorities = np.zeros(capacity)
    tree = SumTree(capacity)
    for _ in range(20):
        rows = rng.integers(0, capacity, 5)
        values = rng.integers(0, 4, 5).astype(float)  # whole numbers: sums are exact, and some priorities are 0
        for row, value in zip(rows, values):
            priorities[row] = value
        tree.set(rows, values)
        assert tree.total == priorities.sum()
        assert tree.positive == (priorities > 0).sum()
        assert tree.min == min(priorities[priorities > 0], default=np.inf)
        np.testing.assert_array_equal(tree.get(np.arange(capacity)), priorities)
        if tree.total:
            sums = np.concatenate([np.arange(tree.total), rng.random(50) * tree.total])
            slow = [next(i for i in range(capacity) if priorities[: i + 1].sum() > u) for u in sums]
            np.testing.assert_array_equal(tree.find(sums), slow)


def test_the_last_of_several_priorities_of_a_row_holds() -> None:
    tree = SumTree(4)
    tree.set([2, 1, 2, 2], [5.0, 1.0, 7.0, 3.0])
    assert tree.get([0, 1, 2, 3]).tolist() == [0, 1, 3, 0]
    assert tree.total == 4
    assert tree.max == 7, "the largest ever set"


def test_rows_of_priority_0_are_never_found() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        priorities = rng.random(13) * 10.0 ** rng.integers(-300, 300, 13) * (rng.random(13) < 0.5)
        if not priorities.any():
            continue
        tree = filled(priorities.tolist())
        u = np.concatenate([np.array([0.0, 0.5, 1.0, 2.0]) * tree.total, np.nextafter(np.cumsum(priorities), np.inf)])
        assert (priorities[tree.find(u)] > 0).all()
        assert tree.find(tree.total) == np.flatnonzero(priorities)[-1]
        assert tree.find(0.0) == np.flatnonzero(priorities)[0]


def test_rounding_at_the_end() -> None:
    tree = filled([0.1] * 10 + [0.0] * 6)
    assert tree.find(np.nextafter(tree.total, 0)) == 9
    assert tree.find(tree.total * (1 + 1e-12)) == 9


def test_sums_do_not_depend_on_the_order_of_changes() -> None:
    rng = np.random.default_rng(1)
    values = rng.random(1000)
    at_once, one_by_one = filled(values.tolist()), SumTree(1000)
    one_by_one.set(np.arange(1000), rng.random(1000))
    for row in rng.permutation(1000):
        one_by_one.set([row], values[row])
    assert at_once.total == one_by_one.total
    u = rng.random(2000) * at_once.total
    np.testing.assert_array_equal(at_once.find(u), one_by_one.find(u))


def test_nothing_can_be_drawn_if_all_priorities_are_0() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        SumTree(3).find([0.0])
    tree = filled([1.0, 2.0, 3.0])
    tree.set([], [])
    assert tree.total == 6

"""The sum tree against cumulative sums."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

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


def test_frequencies_are_proportional_to_priorities() -> None:
    priorities = np.array([1.0, 0.0, 2.0, 3.0, 0.5, 3.5])
    tree = filled(priorities.tolist())
    draws = np.concatenate([tree.stratified(10, np.random.default_rng(seed)) for seed in range(2000)])
    counts = np.bincount(draws, minlength=6)
    assert counts[1] == 0
    drawn = priorities > 0
    # Stratified draws vary less than independent ones, so that the statistic is smaller than chi-square's.
    assert chisquare(counts[drawn], priorities[drawn] / 10 * len(draws)).pvalue > 0.01


def test_each_segment_is_drawn_from_once() -> None:
    tree = filled([1.0] * 64)
    rng = np.random.default_rng(3)
    for k in (1, 4, 16, 64):
        assert (tree.stratified(k, rng) // (64 // k)).tolist() == list(range(k))
    assert tree.stratified(4, offsets=[0.0, 0.5, 0.99, 0.25]).tolist() == [0, 24, 47, 52]
    # Segments of equal priority, not of equally many rows.
    assert filled([1.0, 6.0, 1.0]).stratified(4, offsets=[0.0, 0.5, 0.99, 0.99]).tolist() == [0, 1, 1, 2]


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


def test_the_state_restores_everything() -> None:
    tree = SumTree(11)
    tree.set(np.arange(11), np.random.default_rng(0).random(11))
    tree.set(3, 9.0)
    tree.set(3, 0.0)
    other = SumTree(11)
    other.load_state_dict(tree.state_dict())
    assert (other.total, other.min, other.max, other.positive) == (tree.total, tree.min, 9.0, 10)
    np.testing.assert_array_equal(other.state_dict()["priorities"], tree.state_dict()["priorities"])
    with pytest.raises(ValueError, match="11 rows, this tree has 12"):
        SumTree(12).load_state_dict(tree.state_dict())


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf, -np.inf])
def test_priorities_are_checked(wrong: float) -> None:
    tree = filled([1.0, 2.0])
    with pytest.raises(ValueError, match="a priority is"):
        tree.set([0, 1], [3.0, wrong])
    assert tree.get([0, 1]).tolist() == [1, 2]


def test_rows_and_sums_are_checked() -> None:
    tree = filled([1.0, 2.0, 3.0])  # the tree beneath has four leaves
    for call in (lambda rows: tree.set(rows, 1.0), tree.get):
        for rows in ([3], [-1], [0, 99]):
            with pytest.raises(IndexError, match="rows are 0..2"):
                call(rows)
        with pytest.raises(IndexError, match="whole numbers"):
            call([0.5])
    with pytest.raises(ValueError, match="2 priorities for 3 rows"):
        tree.set([0, 1, 2], [1.0, 2.0])
    for u in (-0.1, np.nan):
        with pytest.raises(ValueError, match="prefix sum"):
            tree.find([u])
    with pytest.raises(ValueError, match="nothing to draw"):
        SumTree(3).find([0.0])
    with pytest.raises(ValueError, match="either rng or offsets"):
        tree.stratified(2)
    with pytest.raises(ValueError, match="3 offsets for 2 segments"):
        tree.stratified(2, offsets=[0, 0, 0])
    with pytest.raises(ValueError, match="capacity is 0"):
        SumTree(0)
    tree.set([], [])
    assert tree.total == 6

"""Importance weights, mixtures and the shares of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from rlvla.replay.sampling import (
    draw,
    draw_uniform,
    importance_weights,
    linear_schedule,
    mixture_probabilities,
    rank_prefix_sums,
)
from rlvla.replay.sum_tree import SumTree


def filled(priorities: np.ndarray) -> SumTree:
    tree = SumTree(len(priorities))
    tree.set(np.arange(len(priorities)), priorities)
    return tree


def test_weights_agree_with_the_formula() -> None:
    p = np.array([0.5, 0.125, 0.01])
    raw = [(20 * x) ** -0.7 for x in p]
    assert importance_weights(p, 20, 0.7, normalise=None) == pytest.approx(raw)
    assert importance_weights(p, 20, 0.7, normalise="clip", max_weight=2.0) == pytest.approx([raw[0], raw[1], 2.0])
    assert importance_weights(p, 20, 0.7) == pytest.approx([w / raw[2] for w in raw])
    largest = (20 * 0.001) ** -0.7
    assert importance_weights(p, 20, 0.7, smallest=0.001) == pytest.approx([w / largest for w in raw])
    assert importance_weights(p, 20, 0.0).tolist() == [1, 1, 1]


@pytest.mark.parametrize("stratified", [True, False])
def test_the_weighted_mean_is_that_of_uniform_draws(stratified: bool) -> None:
    rng = np.random.default_rng(0)
    priorities = rng.random(50) + 0.05
    values = 5 * priorities + rng.normal(0, 1, 50)  # what is drawn more often is larger
    tree = filled(priorities)
    rows = np.concatenate([draw(tree, 32, rng, stratified=stratified) for _ in range(2000)])
    p = priorities[rows] / tree.total
    weights = importance_weights(p, 50, 1.0, normalise=None)
    weighted = weights * values[rows]
    four_errors = 4 * weighted.std() / len(rows) ** 0.5
    assert four_errors < 0.05
    assert weighted.mean() == pytest.approx(values.mean(), abs=four_errors)
    assert values[rows].mean() > values.mean() + 0.5


@pytest.mark.parametrize("stratified", [True, False])
def test_frequencies_are_proportional_to_priorities(stratified: bool) -> None:
    priorities, rng = np.array([1.0, 0.0, 2.0, 3.0, 0.5, 3.5]), np.random.default_rng(1)
    draws = np.concatenate([draw(filled(priorities), 10, rng, stratified=stratified) for _ in range(2000)])
    counts, drawn = np.bincount(draws, minlength=6), priorities > 0
    assert counts[1] == 0
    # Stratified draws vary less than independent ones, so that the statistic is smaller than chi-square's.
    assert chisquare(counts[drawn], priorities[drawn] / 10 * len(draws)).pvalue > 0.01


def test_each_segment_is_drawn_from_once() -> None:
    tree, rng = filled(np.ones(64)), np.random.default_rng(3)
    for k in (1, 4, 16, 64):
        assert (draw(tree, k, rng) // (64 // k)).tolist() == list(range(k))
    # Segments of equal priority, not of equally many rows.
    rows = [draw(filled(np.array([1.0, 6.0, 1.0])), 4, rng) for _ in range(50)]
    assert {row[0] for row in rows} == {0, 1} and {tuple(row[1:3]) for row in rows} == {(1, 1)}


def test_uniform_draws_are_uniform_over_allowed_rows() -> None:
    allowed = np.zeros(1000, dtype=bool)
    allowed[[3, 500, 501, 999]] = True
    rng = np.random.default_rng(0)
    rows = np.concatenate([draw_uniform(lambda at: allowed[at], 1000, 4, 10, rng) for _ in range(400)])
    counts = np.bincount(rows, minlength=1000)
    assert counts[~allowed].sum() == 0
    assert chisquare(counts[allowed]).pvalue > 0.01


def test_mixture() -> None:
    assert mixture_probabilities([1.0, 3.0], 4.0, 2, 0.5) == pytest.approx([0.375, 0.625])
    assert mixture_probabilities([0.0, 0.0], 0.0, 2, 0.0) == pytest.approx([0.5, 0.5])


def test_schedule() -> None:
    assert [linear_schedule(s, 10) for s in (0, 5, 10, 99)] == pytest.approx([0.4, 0.7, 1.0, 1.0])
    assert linear_schedule(3, 12, start=0.0, end=0.5) == pytest.approx(0.125)
    assert linear_schedule(0, 0) in (0.4, 1.0)


def test_ranks_together_draw_as_one_buffer() -> None:
    rng = np.random.default_rng(2)
    parts = [rng.integers(0, 5, size).astype(float) for size in (7, 1, 30, 4)]
    parts[1][:] = 0  # a rank with nothing to offer
    whole, trees = filled(np.concatenate(parts)), [filled(part) for part in parts]
    totals, begins = [tree.total for tree in trees], np.cumsum([0, 7, 1, 30])
    for k in (1, 5, 64):
        offsets = rng.random(k)
        shares = [rank_prefix_sums(totals, rank, (np.arange(k) + offsets) / k) for rank in range(4)]
        assert len(shares[1]) == 0
        rows = np.concatenate([begin + t.find(u) for begin, t, u in zip(begins, trees, shares) if len(u)])
        np.testing.assert_array_equal(rows, whole.find((np.arange(k) + offsets) * (whole.total / k)))
    assert rank_prefix_sums([1.0, 1.0], 1, [0.5]).tolist() == [0.0], "a sum that is reached is exceeded by the next row"
    assert len(rank_prefix_sums([1.0, 1.0, 0.0], 1, [1.0])) == 1, (
        "rounding at the end leaves the last rank that has rows"
    )
    with pytest.raises(ValueError, match="all priorities are 0 on all ranks"):
        rank_prefix_sums([0.0, 0.0], 0, [0.5])

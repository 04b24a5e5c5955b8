"""Draws of rows, and importance weights that correct for their non-uniform probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlvla.replay.sum_tree import Floats, Indices, SumTree


def importance_weights(
    probabilities: ArrayLike,
    size: int,
    beta: float,
    *,
    normalise: str | None = "max",
    max_weight: float = 10.0,
    smallest: float | None = None,
) -> Floats:
    """(size P)^-beta for rows drawn with probabilities P (Schaul et al. 2016); beta 1 corrects fully.

    Args:
        probabilities: [B] of the rows drawn.
        size: number of rows that can be drawn.
        beta: 0 (no correction) to 1 (full).
        normalise: "max" divides by the largest weight in the buffer, "clip" limits weights to `max_weight`, or None.
        max_weight: the limit of "clip".
        smallest: the smallest probability in the buffer, for "max"; by default the smallest of `probabilities`.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    low = p if smallest is None else np.append(p, smallest)
    if normalise == "max":
        return (p / low.min(initial=1.0)) ** -beta
    weights = (size * p) ** -beta
    return np.minimum(weights, max_weight) if normalise == "clip" else weights


def linear_schedule(step: int, total: int, *, start: float = 0.4, end: float = 1.0) -> float:
    """Linear interpolation from `start` at step 0 to `end` at step `total`, then constant; defaults as for beta."""
    return start + (end - start) * min(1.0, max(0, step) / max(1, total))


def draw(tree: SumTree, k: int, rng: np.random.Generator, *, stratified: bool = True) -> Indices:
    """Draw rows [k] in proportion to their priority, one from each of k equal segments or independently."""
    fractions = rng.random(k)
    return tree.find((np.arange(k) + fractions) * (tree.total / k) if stratified else fractions * tree.total)


def mixture_probabilities(priorities: ArrayLike, total: float, size: int, share: float) -> Floats:
    """Probabilities of rows if `share` of the draws is by priority, and the rest uniform over `size` rows."""
    by_priority = np.asarray(priorities, dtype=np.float64) / total if share else np.zeros(np.shape(priorities))
    return share * by_priority + (1 - share) / size


def draw_uniform(
    allowed: Callable[[Indices], NDArray[np.bool_]], rows: int, count: int, k: int, rng: np.random.Generator
) -> Indices:
    """Independent uniform draws [k] of the `count` rows among 0..rows-1 for which `allowed` is true."""
    drawn = np.empty(0, dtype=np.int64)
    while len(drawn) < k:
        candidates = rng.integers(0, rows, 2 + int(1.2 * (k - len(drawn)) * rows / count))
        drawn = np.append(drawn, candidates[allowed(candidates)])
    return drawn[:k]


def rank_prefix_sums(totals: Sequence[float], rank: int, fractions: ArrayLike) -> Floats:
    """Prefix sums of one rank's tree for its rows in a batch drawn from the buffers of all ranks.

    With the same totals and fractions on all ranks, their rows (`SumTree.find` of the result) together are one draw
    from a buffer that holds all rows: P(i) = priority_i / sum(totals). A rank has k totals[rank] / sum(totals) rows on
    average, and possibly none. `importance_weights` needs that P, and the size and smallest probability over all ranks.

    Args:
        totals: `SumTree.total` of each rank.
        rank: this rank.
        fractions: [k] in [0, 1) of the whole sum: `(arange(k) + rng.random(k)) / k` is stratified, `rng.random(k)`
            independent.

    Raises:
        ValueError: all totals are 0.
    """
    sizes = np.asarray(totals, dtype=np.float64)
    if not sizes.sum() > 0:
        raise ValueError("all priorities are 0 on all ranks; there is nothing to draw")
    ends = np.cumsum(sizes)
    sums = np.asarray(fractions, dtype=np.float64) * ends[-1]
    owner = np.minimum(np.searchsorted(ends, sums, side="right"), np.flatnonzero(sizes)[-1])
    return sums[owner == rank] - (ends[rank - 1] if rank else 0.0)

"""Drawing rows, and the weights that correct for drawing some of them more often."""

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
    """(size P)^-beta for rows drawn with probabilities P; with beta 1 their weighted mean is that of uniform draws.

    Args:
        probabilities: [B] of the rows drawn.
        size: number of rows that can be drawn.
        beta: 0 (no correction) to 1 (full).
        normalise: "max" divides by the largest weight in the buffer, "clip" limits them to `max_weight`, None neither.
        max_weight: the limit of "clip".
        smallest: the smallest probability in the buffer, for "max"; by default the smallest of `probabilities`.

    Raises:
        ValueError: a probability is not in (0, 1], size, beta or max_weight is out of its range, or normalise unknown.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    if normalise not in ("max", "clip", None):
        raise ValueError(f"normalise is {normalise!r}; known: max, clip, None")
    if not max_weight > 0:
        raise ValueError(f"max_weight is {max_weight}; it must be positive")
    if size < 1:
        raise ValueError(f"size is {size}; it must be 1 or more")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; it must lie in 0..1")
    low = p if smallest is None else np.append(p, smallest)
    if not ((low > 0) & (p.max(initial=0) <= 1 + 1e-9)).all():
        raise ValueError("a probability is not in (0, 1]; rows of probability 0 cannot have been drawn")
    if normalise == "max":
        return (p / low.min(initial=1.0)) ** -beta
    weights = (size * p) ** -beta
    return np.minimum(weights, max_weight) if normalise == "clip" else weights


def linear_schedule(step: int, total: int, *, start: float = 0.4, end: float = 1.0) -> float:
    """From `start` at step 0 to `end` at step `total`, and `end` from there on; the defaults are those of beta."""
    return start + (end - start) * min(1.0, max(0, step) / max(1, total))


def draw(tree: SumTree, k: int, rng: np.random.Generator, *, stratified: bool = True) -> Indices:
    """Rows [k] in proportion to their priority, stratified or independent."""
    return tree.stratified(k, rng) if stratified else tree.find(rng.random(k) * tree.total)


def mixture_probabilities(priorities: ArrayLike, total: float, size: int, share: float) -> Floats:
    """Probabilities of rows if `share` of the draws is by priority, and the rest uniform over `size` rows.

    Raises:
        ValueError: the share is not in 0..1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share of draws by priority is {share}; it must lie in 0..1")
    by_priority = np.asarray(priorities, dtype=np.float64) / total if share else np.zeros(np.shape(priorities))
    return share * by_priority + (1 - share) / size


def draw_uniform(
    allowed: Callable[[Indices], NDArray[np.bool_]], rows: int, count: int, k: int, rng: np.random.Generator
) -> Indices:
    """Independent draws [k] of those `count` rows among 0..rows-1 for which `allowed` is true."""
    found = np.empty(0, dtype=np.int64)
    while len(found) < k:
        candidates = rng.integers(0, rows, 2 + int(1.2 * (k - len(found)) * rows / count))
        found = np.append(found, candidates[allowed(candidates)])
    return found[:k]


def rank_prefix_sums(totals: Sequence[float], rank: int, fractions: ArrayLike) -> Floats:
    """The share of one rank in a batch drawn from the buffers of all ranks, as prefix sums of its own tree.

    With the same totals and fractions on all ranks, their rows (`SumTree.find` of the result) together are one draw
    from a buffer that holds all rows: P(i) = priority_i / sum(totals). A rank has k totals[rank] / sum(totals) rows on
    average, and possibly none. `importance_weights` needs that P, and the size and smallest probability over all ranks.

    Args:
        totals: `SumTree.total` of each rank.
        rank: this rank.
        fractions: [k] in [0, 1) of the whole sum: `(arange(k) + rng.random(k)) / k` is stratified, `rng.random(k)`
            independent.

    Raises:
        ValueError: a total is negative or not finite, or all are 0.
    """
    sizes = np.asarray(totals, dtype=np.float64)
    if not (np.isfinite(sizes) & (sizes >= 0)).all() or not sizes.sum() > 0:
        raise ValueError(f"the totals of the ranks are {list(totals)}; one must be positive, none negative")
    ends = np.cumsum(sizes)
    sums = np.asarray(fractions, dtype=np.float64) * ends[-1]
    owner = np.minimum(np.searchsorted(ends, sums, side="right"), np.flatnonzero(sizes)[-1])
    return sums[owner == rank] - (ends[rank - 1] if rank else 0.0)

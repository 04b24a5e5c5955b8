"""A tree of partial sums: rows are drawn in proportion to their priority in logarithmic time, many at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

_FEW = 1000  # nodes; to compute some of so few twice takes less time than to find out which


def last_of_each(indices: Indices) -> Indices:
    """Positions of the last occurrence of each value, in the order of the values."""
    _, from_the_end = np.unique(indices[::-1], return_index=True)
    return len(indices) - 1 - from_the_end


class SumTree:
    """Priorities of the rows 0..capacity-1, all 0 at first, with their sum and the smallest positive one.

    The sums depend on the priorities alone, not on the order in which they were set.

    Args:
        capacity: number of rows.

    Attributes:
        positive: number of rows with a positive priority.
        max: the largest priority ever set; 0 if there was none.

    Raises:
        ValueError: the capacity is not positive.
    """

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be 1 or more")
        self.capacity = capacity
        self.positive = 0
        self.max = 0.0
        self._depth = (capacity - 1).bit_length()
        self._leaf = 1 << self._depth  # node 1 is the root, 2i and 2i + 1 are below i, and the rows begin here
        self._sums = np.zeros(2 * self._leaf)
        self._least = np.full(2 * self._leaf, np.inf)  # smallest positive priority below a node

    @property
    def total(self) -> float:
        """Sum of the priorities."""
        return float(self._sums[1])

    @property
    def min(self) -> float:
        """The smallest positive priority; infinity if there is none."""
        return float(self._least[1])

    def get(self, indices: ArrayLike) -> Floats:
        """Priorities of the rows `indices`.

        Raises:
            IndexError: an index is not a row.
        """
        return self._sums[self._leaf + self._checked(indices)]

    def set(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Set the priorities [B] (or one for all) of the rows `indices` [B]; of a row named twice the last one holds.

        Raises:
            IndexError: an index is not a row.
            ValueError: a priority is negative, NaN or infinite, or there are more or fewer than rows. Nothing is set.
        """
        rows = self._checked(indices).ravel()
        values = np.asarray(priorities, dtype=np.float64)
        if values.ndim and values.size != rows.size:
            raise ValueError(f"{values.size} priorities for {rows.size} rows")
        wrong = values[~(np.isfinite(values) & (values >= 0))]
        if wrong.size:
            raise ValueError(f"a priority is {wrong.flat[0]}; priorities are finite and not negative")
        if not rows.size:
            return
        values = np.broadcast_to(values.ravel(), rows.shape)
        self.max = max(self.max, float(values.max()))
        last = last_of_each(rows)
        nodes, values = self._leaf + rows[last], values[last]
        self.positive += int(np.count_nonzero(values) - np.count_nonzero(self._sums[nodes]))
        self._sums[nodes] = values
        self._least[nodes] = np.where(values > 0, values, np.inf)
        for _ in range(self._depth):
            nodes = nodes >> 1
            if len(nodes) > _FEW:
                nodes = nodes[np.append(True, nodes[1:] != nodes[:-1])]
            below = self._sums.reshape(-1, 2).take(nodes, axis=0)
            self._sums[nodes] = below[:, 0] + below[:, 1]
            below = self._least.reshape(-1, 2).take(nodes, axis=0)
            self._least[nodes] = np.minimum(below[:, 0], below[:, 1])

    def find(self, prefix_sums: ArrayLike) -> Indices:
        """For each u the smallest row whose cumulative sum of priorities exceeds u; never one of priority 0.

        From `total` on, which rounding may reach, it is the last row with a positive priority.

        Raises:
            ValueError: all priorities are 0, or a u is negative or NaN.
        """
        left_over = np.array(prefix_sums, dtype=np.float64)
        if not self.total > 0:
            raise ValueError("all priorities are 0; there is nothing to draw")
        if not (left_over >= 0).all():
            raise ValueError("a prefix sum is negative or NaN")
        left_over[left_over >= self.total] = np.inf  # always to the right, as far as there are positive priorities
        nodes = np.ones(left_over.shape, dtype=np.int64)
        for _ in range(self._depth):
            below = self._sums.reshape(-1, 2).take(nodes, axis=0)
            right = (left_over >= below[..., 0]) & (below[..., 1] > 0)
            left_over -= below[..., 0] * right
            nodes = 2 * nodes + right
        return nodes - self._leaf

    def stratified(
        self, k: int, rng: np.random.Generator | None = None, *, offsets: ArrayLike | None = None
    ) -> Indices:
        """Rows [k], one from each of k equal segments of the cumulative sum.

        Args:
            k: number of rows.
            rng: draws the offsets.
            offsets: [k] in [0, 1), the position in each segment, instead of `rng`.

        Raises:
            ValueError: all priorities are 0, offsets of another number, or neither or both of rng and offsets.
        """
        if (rng is None) == (offsets is None):
            raise ValueError("give either rng or offsets")
        within = rng.random(k) if rng is not None else np.asarray(offsets, dtype=np.float64)
        if within.shape != (k,):
            raise ValueError(f"{within.size} offsets for {k} segments")
        return self.find((np.arange(k) + within) * (self.total / k))

    def state_dict(self) -> dict[str, Any]:
        """Everything there is to know, for `load_state_dict`."""
        return {"priorities": self._sums[self._leaf : self._leaf + self.capacity].copy(), "max": self.max}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, to the bit.

        Raises:
            ValueError: it is of another capacity, or its priorities are not valid.
        """
        if len(state["priorities"]) != self.capacity:
            raise ValueError(f"the state has {len(state['priorities'])} rows, this tree has {self.capacity}")
        self.set(np.arange(self.capacity), state["priorities"])
        self.max = float(state["max"])

    def _checked(self, indices: ArrayLike) -> Indices:
        rows = np.asarray(indices)
        if rows.size and rows.dtype.kind not in "iu":
            raise IndexError(f"rows are whole numbers, not {rows.dtype}")
        rows = rows.astype(np.int64, copy=False)
        if rows.size and (rows.min() < 0 or rows.max() >= self.capacity):
            raise IndexError(
                f"a row is {rows.min() if rows.min() < 0 else rows.max()}; rows are 0..{self.capacity - 1}"
            )
        return rows

"""Sum tree: vectorized draws of rows in proportion to their priority, in logarithmic time."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

_FEW = 1000  # nodes, below which removing duplicates costs more than computing them twice


def last_of_each(indices: Indices) -> Indices:
    """Positions of the last occurrence of each value, in the order of the values."""
    _, from_the_end = np.unique(indices[::-1], return_index=True)
    return len(indices) - 1 - from_the_end


class SumTree:
    """Priorities of the rows 0..capacity-1, initially 0, with their sum and the smallest positive one.

    The sums depend on the priorities alone, not on the order in which they were set.

    Args:
        capacity: number of rows.

    Attributes:
        positive: number of rows with a positive priority.
        max: the largest priority ever set; initially 0.
    """

    def __init__(self, capacity: int):
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
        """The smallest positive priority; infinity without one."""
        return float(self._least[1])

    def get(self, indices: ArrayLike) -> Floats:
        """Priorities of the rows `indices`."""
        return self._sums[self._leaf + np.asarray(indices, dtype=np.int64)]

    def set(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Set the finite, non-negative priorities [B] (or one for all) of rows [B]; the last of duplicates holds."""
        rows = np.asarray(indices, dtype=np.int64).ravel()
        if not rows.size:
            return
        values = np.broadcast_to(np.asarray(priorities, dtype=np.float64).ravel(), rows.shape)
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
            ValueError: all priorities are 0.
        """
        left_over = np.array(prefix_sums, dtype=np.float64)
        if not self.total > 0:
            raise ValueError("all priorities are 0; there is nothing to draw")
        left_over[left_over >= self.total] = np.inf  # always to the right, as far as there are positive priorities
        nodes = np.ones(left_over.shape, dtype=np.int64)
        for _ in range(self._depth):
            below = self._sums.reshape(-1, 2).take(nodes, axis=0)
            right = (left_over >= below[..., 0]) & (below[..., 1] > 0)
            left_over -= below[..., 0] * right
            nodes = 2 * nodes + right
        return nodes - self._leaf

"""n-step returns over rows of an episode.

A row is a decision and may take several env steps; the discount counts env steps. An episode that was truncated
bootstraps the value of its last observation, one that terminated does not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlvla.replay.sum_tree import Floats, Indices

Bools = NDArray[np.bool_]


def row_rewards(rewards: ArrayLike, steps: ArrayLike, gamma: float) -> Floats:
    """Discounted reward of each row [...] from its rewards per env step [..., A], of which it took `steps` [...]."""
    per_step = np.asarray(rewards, dtype=np.float64)
    index = np.arange(per_step.shape[-1])
    taken = index < np.asarray(steps)[..., None]
    return np.where(taken, per_step * gamma**index, 0.0).sum(-1)


def follow(starts: Indices, successor: Callable[[Indices], Indices], length: int) -> tuple[Indices, Bools]:
    """Windows of `length` consecutive rows of one episode.

    Args:
        starts: [B] first rows.
        successor: rows -> the next rows of their episodes, -1 after the last one.
        length: rows of a window.

    Returns:
        Rows [B, length] and a mask that is false beyond the end of an episode, where its last row is repeated.
    """
    rows = np.empty((len(starts), length), dtype=np.int64)
    mask = np.ones((len(starts), length), dtype=bool)
    rows[:, 0] = starts
    for i in range(1, length):
        following = successor(rows[:, i - 1])
        mask[:, i] = mask[:, i - 1] & (following >= 0)
        rows[:, i] = np.where(mask[:, i], following, rows[:, i - 1])
    return rows, mask


def window_returns(
    rewards: ArrayLike, row_discounts: ArrayLike, terminated: ArrayLike, mask: ArrayLike
) -> tuple[Floats, Floats, Indices]:
    """Discounted rewards of windows up to the first terminated row, or the end of the window.

    Args:
        rewards: [B, n], discounted within each row (`row_rewards`).
        row_discounts: [B, n], gamma to the number of env steps of the row.
        terminated: [B, n].
        mask: [B, n] as of `follow`; the first row of each window is valid.

    Returns:
        Returns [B]; discounts [B] of the value to bootstrap from, 0 if terminated; and the position [B] of the last row
        that counts, after which to bootstrap.
    """
    ends = np.asarray(terminated, dtype=bool)
    open_ = np.asarray(mask, dtype=bool) & (np.cumsum(ends, axis=1) - ends == 0)
    after = np.cumprod(np.where(open_, row_discounts, 1.0), axis=1)  # discount after each row
    before = np.concatenate([np.ones((len(after), 1)), after[:, :-1]], axis=1)
    returns = np.where(open_, before * np.asarray(rewards, dtype=np.float64), 0.0).sum(1)
    last = open_.sum(1) - 1
    stopped = np.take_along_axis(ends, last[:, None], axis=1)[:, 0]
    return returns, np.where(stopped, 0.0, after[:, -1]), last

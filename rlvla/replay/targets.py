"""Targets over several rows of an episode.

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

    Raises:
        ValueError: the length is not positive.
    """
    if length < 1:
        raise ValueError(f"a window has {length} rows; it needs 1 or more")
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


def n_step_targets(
    rewards: ArrayLike,
    next_values: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike,
    *,
    n: int,
    gamma: float,
    steps: ArrayLike | None = None,
) -> tuple[Floats, Floats, Indices]:
    """n-step targets of consecutive rows; an episode ends with a terminated or truncated row, and with the last row.

    Args:
        rewards: [T] reward of each row, discounted within the row (`row_rewards`).
        next_values: [T] value of the observation after each row; that of a truncated row is its final observation's.
        terminated: [T] bool; nothing is bootstrapped after such a row, even if it is also truncated.
        truncated: [T] bool.
        n: largest number of rows of a target.
        gamma: discount per env step.
        steps: [T] env steps of each row, by default 1.

    Returns:
        Targets [T] = discounted rewards + discounts * next_values[boot_index]; discounts [T], 0 if the target ends with
        a terminated row; boot_index [T], the last row of each target.

    Raises:
        ValueError: shapes differ or are not [T], n is not positive, gamma is not in 0..1, or steps are not positive.
    """
    ends, cut = np.asarray(terminated, dtype=bool), np.asarray(truncated, dtype=bool)
    reward, value = np.asarray(rewards, dtype=np.float64), np.asarray(next_values, dtype=np.float64)
    taken = np.ones(reward.shape, dtype=np.int64) if steps is None else np.asarray(steps)
    if reward.ndim != 1 or not reward.shape == value.shape == ends.shape == cut.shape == taken.shape:
        shapes = ", ".join(str(x.shape) for x in (reward, value, ends, cut, taken))
        raise ValueError(f"rewards, next_values, terminated, truncated and steps must be [T] each, not {shapes}")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it must lie in 0..1")
    if not (taken > 0).all():
        raise ValueError("each row takes 1 env step or more")
    index = np.arange(len(reward))
    over = ends | cut | (index == len(reward) - 1)
    rows, mask = follow(index, lambda at: np.where(over[at], -1, at + 1), n)
    returns, discounts, last = window_returns(reward[rows], gamma ** taken[rows], ends[rows], mask)
    boot_index = rows[index, last]
    bootstrap = np.where(discounts > 0, value[boot_index], 0.0)  # a value after a terminated row may be anything
    return returns + discounts * bootstrap, discounts, boot_index

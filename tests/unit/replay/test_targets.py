"""Windows of rows and their n-step returns against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from rlvla.replay.targets import follow, row_rewards, window_returns
from tests.support.replay import slow_returns


@pytest.mark.parametrize("seed", range(20))
def test_returns_agree_with_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length, n, gamma = int(rng.integers(1, 40)), int(rng.integers(1, 8)), float(rng.choice([0.0, 0.9, 1.0]))
    rewards = rng.normal(size=length)
    terminated, truncated = rng.random(length) < 0.15, rng.random(length) < 0.15
    steps = rng.integers(1, 5, length)
    over = terminated | truncated | (np.arange(length) == length - 1)
    rows, mask = follow(np.arange(length), lambda at: np.where(over[at], -1, at + 1), n)
    returns, discounts, last = window_returns(rewards[rows], gamma ** steps[rows], terminated[rows], mask)
    expected = slow_returns(rewards, terminated, truncated, n=n, gamma=gamma, steps=steps)
    for actual, wanted in zip((returns, discounts, rows[np.arange(length), last]), expected):
        np.testing.assert_allclose(actual, wanted, atol=1e-12)


def test_a_truncated_row_bootstraps_and_a_terminated_one_does_not() -> None:
    ends, mask = np.array([[False, False], [False, True], [True, False]]), np.ones((3, 2), dtype=bool)
    returns, discounts, last = window_returns(np.ones((3, 2)), np.full((3, 2), 0.5), ends, mask)
    assert returns.tolist() == [1.5, 1.5, 1] and discounts.tolist() == [0.25, 0, 0] and last.tolist() == [1, 1, 0]


def test_rewards_within_a_row_are_discounted() -> None:
    rewards = np.array([[1.0, 2.0, 4.0], [1.0, np.nan, np.nan]])
    assert row_rewards(rewards, [3, 1], 0.5) == pytest.approx([1 + 1 + 1, 1])


def test_windows_end_with_the_episode() -> None:
    following = np.array([1, 2, -1, 4, -1])
    rows, mask = follow(np.array([0, 2, 3]), lambda at: following[at], 3)
    assert rows.tolist() == [[0, 1, 2], [2, 2, 2], [3, 4, 4]]
    assert mask.tolist() == [[True] * 3, [True, False, False], [True, True, False]]

"""n-step targets against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from rlvla.replay.targets import follow, n_step_targets, row_rewards


def slow_targets(rewards, values, terminated, truncated, n, gamma, steps):
    found = []
    for start in range(len(rewards)):
        target, discount, at = 0.0, 1.0, start
        for k in range(n):
            at = start + k
            target += discount * rewards[at]
            discount *= gamma ** steps[at]
            if terminated[at] or truncated[at] or at == len(rewards) - 1:
                break
        if terminated[at]:
            discount = 0.0
        else:
            target += discount * values[at]
        found.append((target, discount, at))
    return zip(*found)


@pytest.mark.parametrize("seed", range(20))
def test_targets_agree_with_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length, n, gamma = int(rng.integers(1, 40)), int(rng.integers(1, 8)), float(rng.choice([0.0, 0.9, 1.0]))
    rewards, values = rng.normal(size=length), rng.normal(size=length)
    terminated, truncated = rng.random(length) < 0.15, rng.random(length) < 0.15
    steps = rng.integers(1, 5, length) if seed % 2 else np.ones(length, dtype=int)
    wanted = slow_targets(rewards, values, terminated, truncated, n, gamma, steps)
    found = n_step_targets(rewards, values, terminated, truncated, n=n, gamma=gamma, steps=steps if seed % 2 else None)
    for one, other in zip(found, wanted):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_a_truncated_row_bootstraps_and_a_terminated_one_does_not() -> None:
    nan = float("nan")
    targets, discounts, boot = n_step_targets(
        [1, 1, 1, 1], [nan, 10, nan, nan], [0, 0, 0, 1], [0, 1, 0, 0], n=3, gamma=0.5
    )
    assert targets.tolist() == [1 + 0.5 + 0.25 * 10, 1 + 0.5 * 10, 1.5, 1]
    assert discounts.tolist() == [0.25, 0.5, 0, 0]
    assert boot.tolist() == [1, 1, 3, 3]


def test_both_ends_at_once_terminate() -> None:
    targets, discounts, _ = n_step_targets([1.0], [5.0], [True], [True], n=1, gamma=0.9)
    assert (targets[0], discounts[0]) == (1, 0)


def test_rewards_within_a_row_are_discounted() -> None:
    rewards = np.array([[1.0, 2.0, 4.0], [1.0, np.nan, np.nan]])
    assert row_rewards(rewards, [3, 1], 0.5) == pytest.approx([1 + 1 + 1, 1])
    per_row = n_step_targets(row_rewards(rewards, [3, 1], 0.5), [0, 8], [0, 0], [0, 0], n=2, gamma=0.5, steps=[3, 1])
    per_step = n_step_targets([1, 2, 4, 1], [0, 0, 0, 8], [0] * 4, [0] * 4, n=4, gamma=0.5)
    assert per_row[0][0] == pytest.approx(per_step[0][0])
    assert per_row[1][0] == pytest.approx(0.5**4)


def test_windows_end_with_the_episode() -> None:
    following = np.array([1, 2, -1, 4, -1])
    rows, mask = follow(np.array([0, 2, 3]), lambda at: following[at], 3)
    assert rows.tolist() == [[0, 1, 2], [2, 2, 2], [3, 4, 4]]
    assert mask.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    with pytest.raises(ValueError, match="a window has 0 rows"):
        follow(np.array([0]), lambda at: following[at], 0)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"n": 0}, "a window has 0 rows"),
        ({"gamma": 1.01}, "gamma is 1.01"),
        ({"steps": [0, 1]}, "1 env step or more"),
        ({"truncated": [0]}, "must be .T. each"),
        ({"rewards": [[1.0, 1.0]]}, "must be .T. each"),
    ],
)
def test_arguments_are_checked(wrong: dict, named: str) -> None:
    given = {"rewards": [1, 1], "next_values": [0, 0], "terminated": [0, 0], "truncated": [0, 0], "n": 2, "gamma": 0.9}
    with pytest.raises(ValueError, match=named):
        n_step_targets(**given | wrong)

"""Optimiser steps keep episodes whole; micro-batches cover a step exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlvla.experience import Experience
from rlvla.trainer.replay import ReplayList, micro_batches, step_sizes


def rows(lengths: list[int]) -> Experience:
    """Episodes of these lengths; the token of a row is its number."""
    n = sum(lengths)
    return Experience(
        images=torch.zeros(n, 1, 2, 2, 3, dtype=torch.uint8),
        instructions=["x"] * n,
        episode_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        trace={"tokens": torch.arange(n)[:, None].repeat(1, 4)},
        action_mask=torch.ones(n, 4, dtype=torch.bool),
        value_mask=torch.ones(n, 4, dtype=torch.bool),
    )


def test_no_episode_is_split_over_steps() -> None:
    replay, lengths = ReplayList(), [3, 1, 4, 2, 5, 2, 3]
    replay.append(rows(lengths))
    steps = list(replay.optimizer_steps([2, 2, 2, 1], np.random.default_rng(0)))
    episodes = [set(step.episode_index.tolist()) for step in steps]
    assert [len(e) for e in episodes] == [2, 2, 2, 1]
    assert set().union(*episodes) == set(range(7)) and sum(len(e) for e in episodes) == 7
    for step, own in zip(steps, episodes):
        assert len(step) == sum(lengths[i] for i in own)
    seen = torch.cat([step.action_tokens[:, 0] for step in steps]).tolist()
    assert sorted(seen) == list(range(sum(lengths)))


def test_order_is_shuffled_and_repeats_with_the_generator() -> None:
    replay = ReplayList()
    replay.append(rows([2] * 10))

    def order(seed: int) -> list[int]:
        steps = replay.optimizer_steps([5, 5], np.random.default_rng(seed))
        return [token for step in steps for token in step.action_tokens[:, 0].tolist()]

    assert order(1) == order(1) != order(2)
    assert order(1) != sorted(order(1))
    first = list(replay.optimizer_steps([5, 5], np.random.default_rng(1)))[0].episode_index.tolist()
    assert first != sorted(first), "rows of a step are mixed, so that micro-batches are alike"


def test_equal_steps_are_consecutive_parts_of_the_shuffled_episodes() -> None:
    replay = ReplayList()
    replay.append(rows([2] * 6))
    rng = np.random.default_rng(3)
    order = rng.permutation(6)
    steps = replay.optimizer_steps([3, 3], np.random.default_rng(3))
    for portion, step in zip(order.reshape(2, 3), steps, strict=True):
        expected = rng.permutation(np.flatnonzero(np.isin(np.repeat(np.arange(6), 2), portion)))
        assert step.action_tokens[:, 0].tolist() == expected.tolist()


def test_parts_are_joined_and_cleared() -> None:
    replay = ReplayList()
    replay.append(rows([2, 1]))
    replay.append(rows([3]))
    assert len(replay) == 6
    assert replay.experience().episode_index.tolist() == [0, 0, 1, 2, 2, 2]
    assert [len(step) for step in replay.optimizer_steps([3], np.random.default_rng(0))] == [6]
    assert sorted(len(step) for step in replay.optimizer_steps([1, 1, 1], np.random.default_rng(0))) == [1, 2, 3]
    replay.clear()
    assert len(replay) == 0


def test_a_step_without_episodes_is_a_masked_row() -> None:
    replay = ReplayList()
    replay.append(rows([2]))
    full, blank = replay.optimizer_steps([1, 0], np.random.default_rng(0))
    assert len(full) == 2 and full.action_mask.all()
    assert len(blank) == 1 and not blank.action_mask.any()


@pytest.mark.parametrize(
    ("episodes", "batch", "sizes"),
    [
        ([7], 3, [[3, 2, 2]]),
        ([9], 3, [[3, 3, 3]]),
        ([2], 3, [[2]]),
        ([6, 6], 4, [[2, 2, 2], [2, 2, 2]]),
        ([4, 3], 6, [[2, 2], [2, 1]]),
        ([5, 1], 6, [[5], [1]]),
        ([4, 5, 1], 3, [[1, 1, 1, 1], [2, 1, 1, 1], [0, 1, 0, 0]]),
    ],
)
def test_a_remainder_is_spread_over_the_steps(episodes: list[int], batch: int, sizes: list[list[int]]) -> None:
    assert step_sizes(episodes, batch) == sizes


def test_steps_differ_by_at_most_one_episode_over_all_ranks() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        episodes = rng.integers(0, 20, size=rng.integers(1, 6)).tolist()
        batch = int(rng.integers(1, 12))
        sizes = np.array(step_sizes(episodes, batch))
        assert sizes.sum(1).tolist() == episodes
        totals = sizes.sum(0)
        assert len(totals) == max(1, -(-sum(episodes) // batch)), "as many steps as on one rank"
        assert totals.max() - totals.min() <= 1 and totals.max() <= batch


@pytest.mark.parametrize(("size", "count"), [(4, 3), (10, 1), (3, 4), (1, 10)])
def test_micro_batches_cover_a_step_once(size: int, count: int) -> None:
    step = rows([10])
    parts = list(micro_batches(step, size, count))
    assert len(parts) == count and max(map(len, parts)) <= size
    assert torch.cat([part.action_tokens[:, 0] for part in parts]).tolist() == list(range(10))


def test_missing_micro_batches_are_blank_rows() -> None:
    parts = list(micro_batches(rows([5]), 4, 4))
    assert [len(part) for part in parts] == [4, 1, 1, 1]
    for blank in parts[2:]:
        assert not blank.action_mask.any() and not blank.value_mask.any()
    assert parts[1].action_mask.all()

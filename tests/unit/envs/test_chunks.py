"""Rewards and ends of episodes inside a chunk."""

from __future__ import annotations

import numpy as np
import pytest

from rlvla.envs.base import ChunkResult, Observation
from rlvla.envs.chunks import ChunkRunner

OBSERVATION = Observation(np.zeros((1, 2, 2, 3), np.uint8), None, "do it")


@pytest.mark.parametrize(
    ("successes", "ends_with_success"),
    [("0011110011", True), ("0011110001", False), ("0011000000", False), ("0000000000", False)],
)
def test_playing_on_to_the_step_limit(successes: str, ends_with_success: bool) -> None:
    """Success must hold for two steps at the limit of ten; earlier success does not end the episode."""
    runner, left = ChunkRunner(max_steps=10, hold_steps=2, plays_on=True), [step == "1" for step in successes]

    def play(length: int) -> ChunkResult:
        return runner.play(np.zeros((length, 1)), lambda _: (left.pop(0), frozenset()), lambda: OBSERVATION)

    runner.begin()
    first, last = play(6), play(6)
    assert not (first.terminated or first.truncated or first.success_at_end) and first.rewards.sum() == 0
    assert last.steps_executed == 4 and last.rewards.sum() == ends_with_success
    assert (last.terminated, last.truncated, last.success_at_end) == (ends_with_success, not ends_with_success) + (
        ends_with_success,
    )
    with pytest.raises(RuntimeError, match="before reset"):
        play(1)


@pytest.mark.parametrize("plays_on", [False, True])
@pytest.mark.parametrize(
    ("success", "over", "cut", "flags"),  # flags: terminated, truncated, success_at_end
    [
        (False, True, False, (True, False, False)),
        (False, True, True, (True, False, False)),
        (False, False, True, (False, True, False)),
        (True, True, False, (True, False, True)),  # though not held for two steps
        (True, False, True, (False, True, False)),
        (False, False, False, (False, False, False)),
    ],
)
def test_an_episode_that_the_simulator_ends(success, over, cut, flags, plays_on) -> None:
    """At the second of three actions; the flags are Gymnasium's."""
    runner, steps = ChunkRunner(max_steps=10, hold_steps=2, plays_on=plays_on), []

    def advance(action: np.ndarray) -> tuple[bool, frozenset[str]]:
        steps.append(action)
        return success and len(steps) == 2, frozenset()

    runner.begin()
    ends = lambda: (over and len(steps) == 2, cut and len(steps) == 2)  # noqa: E731
    result = runner.play(np.zeros((3, 1)), advance, lambda: OBSERVATION, ended=ends)
    assert (result.terminated, result.truncated, result.success_at_end) == flags
    assert result.steps_executed == (2 if over or cut else 3) and result.rewards.sum() == flags[2]


def test_a_failure_at_the_step_limit_is_not_truncated() -> None:
    runner = ChunkRunner(max_steps=1, hold_steps=1)
    runner.begin()
    result = runner.play(
        np.zeros((1, 1)), lambda _: (False, frozenset()), lambda: OBSERVATION, ended=lambda: (True, False)
    )
    assert result.terminated and not result.truncated and not result.success_at_end


@pytest.mark.parametrize(("dense", "paid"), [(False, [0, 0, 0, 1, 0, 0]), (True, [-1.5, -2.5, -3.5, -4.5, 0, 0])])
def test_the_simulators_reward_of_each_step_or_one_for_success(dense: bool, paid: list[float]) -> None:
    """Success holds from the third step on, for two steps; six actions are given."""
    runner, steps = ChunkRunner(max_steps=10, hold_steps=2), []

    def advance(action: np.ndarray) -> tuple[bool, frozenset[str]]:
        steps.append(action)
        return len(steps) >= 3, frozenset()

    def play(actions: np.ndarray) -> ChunkResult:
        reward = (lambda: -len(steps) - 0.5) if dense else None
        return runner.play(actions, advance, lambda: OBSERVATION, reward=reward)

    runner.begin()
    result = play(np.zeros((6, 1)))
    assert result.terminated and result.steps_executed == 4
    assert result.rewards.tolist() == paid and result.rewards.dtype == np.float32
    steps.clear()
    runner.begin()
    chunks = [play(np.zeros((size, 1))).rewards.tolist() for size in (3, 1)]
    assert [*chunks[0], *chunks[1]] == paid[:4], "wherever the cut is"


def test_a_primitive_that_ends_early() -> None:
    """Done after two of five steps; the step limit is at three."""
    runner, steps = ChunkRunner(max_steps=3, hold_steps=1), []

    def advance(action: np.ndarray) -> tuple[bool, frozenset[str]]:
        steps.append(action)
        return False, frozenset()

    def play() -> ChunkResult:
        return runner.play(np.zeros((5, 1)), advance, lambda: OBSERVATION, done=lambda: len(steps) == 2)

    runner.begin()
    first, last = play(), play()
    assert first.steps_executed == 2 and not first.terminated and not first.truncated
    assert first.rewards.shape == first.successes.shape == (5,) and len(first.events) == 2
    assert last.steps_executed == 1 and last.truncated

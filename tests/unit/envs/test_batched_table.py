"""Ends of episodes in a batched table; the steps of its suites are tested by their contracts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlvla.envs.batched_slots import Advanced, BatchedTable
from rlvla.envs.options import SuiteOptions
from rlvla.envs.toy_reach.env import ToyReachOptions, list_tasks

OPTIONS = ToyReachOptions(success_hold_steps=2)


class Scripted(BatchedTable):
    """A step succeeds where the first number of its action is positive."""

    def __init__(self, options: SuiteOptions = OPTIONS):
        super().__init__(replace(list_tasks()[0], max_steps=6), 2, options)

    def _begin(self, slot: int, init_state_id: int) -> None:
        self._backgrounds[slot] = 0

    def _advance(self, slots: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, list[frozenset[str]]]:
        return actions[:, 0] > 0, [frozenset()] * len(slots)

    def _paint(self, images: np.ndarray, slots: np.ndarray) -> None: ...

    def _position(self, slots: np.ndarray) -> np.ndarray:
        return np.zeros((len(slots), 2))


def actions(*rows: list[int]) -> np.ndarray:
    return np.array([[[value, 0] for value in row] for row in rows], dtype=np.float32)


def test_success_must_last() -> None:
    table = Scripted()
    table.reset([0, 1], [0, 1], [0, 0])
    first, second = table.step_chunk([0, 1], actions([1, 0, 1], [0, 1, 1]))
    assert not (first.terminated or first.truncated) and first.successes.tolist() == [True, False, True]
    assert second.terminated and second.steps_executed == 3 and second.rewards.tolist() == [0, 0, 1]
    (first,) = table.step_chunk([0], actions([1, 1, 1]))  # the streak goes on from the chunk before
    assert first.terminated and first.steps_executed == 1
    with pytest.raises(RuntimeError):
        table.step_chunk([1], actions([1]))


class Fragile(Scripted):
    """The simulator ends an episode where the second number of its action is positive."""

    def _advance(self, slots: np.ndarray, actions: np.ndarray) -> Advanced:
        return Advanced(actions[:, 0] > 0, [frozenset()] * len(slots), terminated=actions[:, 1] > 0)


@pytest.mark.parametrize("after_success", ["end", "continue"])
def test_an_episode_that_the_simulator_ends(after_success: str) -> None:
    """With failure, or with success, which then need not last; another slot is not affected."""
    table = Fragile(replace(OPTIONS, after_success=after_success))
    for success in (0, 1):
        table.reset([0, 1], [0, 1], [0, 0])
        ended, goes_on = table.step_chunk([0, 1], np.array([[[0, 0], [success, 1], [0, 0]], [[0, 0]] * 3], np.float32))
        assert (ended.terminated, ended.truncated, ended.success_at_end) == (True, False, bool(success))
        assert ended.steps_executed == 2 and ended.rewards.tolist() == [0, success, 0]
        assert not (goes_on.terminated or goes_on.truncated) and goes_on.steps_executed == 3


def test_an_episode_ends_at_the_step_limit() -> None:
    table = Scripted()
    table.reset([1], [0], [0])
    (result,) = table.step_chunk([1], actions([1, 0] * 4))
    assert result.truncated and not result.terminated and result.steps_executed == 6


def test_an_episode_that_plays_on_counts_at_its_end() -> None:
    options = replace(OPTIONS, after_success="continue")
    held, lost = Scripted(options), Scripted(options)
    for table, last, succeeds in ((held, [1, 1], True), (lost, [1, 0], False)):
        table.reset([0], [0], [0])
        (result,) = table.step_chunk([0], actions([1, 1, 1, 1, *last]))
        assert result.steps_executed == 6 and result.terminated == succeeds

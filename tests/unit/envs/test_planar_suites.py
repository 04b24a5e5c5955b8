"""The suites of the benchmarks: the contract of environments, and experts that solve them."""

from __future__ import annotations

import numpy as np
import pytest

import benchmarks.suites.pick_place
import benchmarks.suites.planar
import benchmarks.suites.unseen  # noqa: F401 (all register their suites)
from rlvla.envs import list_tasks, make_env
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.experts.episode import play_expert_episode
from rlvla.envs.testing import EnvContract

SUITES = ("pick_place", "ring_push", "key_door", "lever", "slot", "sort_two")


class Planar(EnvContract):
    options = {"image_size": 32}
    hold_steps = 2


class TestPickPlace(Planar):
    suite = "pick_place"
    hold_steps = 3


class TestRingPush(Planar):
    suite = "ring_push"


class TestKeyDoor(Planar):
    suite = "key_door"


class TestLever(Planar):
    suite = "lever"


class TestSlot(Planar):
    suite = "slot"


class TestSortTwo(Planar):
    suite = "sort_two"


@pytest.mark.parametrize("suite", SUITES)
def test_the_expert_solves_every_task_and_the_instruction_matters(suite: str) -> None:
    tasks, states = list_tasks(suite, image_size=32), range(10)
    episodes = {}
    for task in tasks:
        env, expert = make_env(suite, task.task_id, image_size=32), make_expert(suite, task.task_id, ExpertConfig())
        episodes[task.task_id] = [play_expert_episode(env, expert, state, 0) for state in states]
    assert np.mean([episode["success_at_end"] for plays in episodes.values() for episode in plays]) >= 0.95
    env = make_env(suite, 1, image_size=32)
    for state in states:
        env.reset(state, 0)
        other = env.step_chunk(episodes[0][state]["actions"])
        assert not other.success_at_end, "the actions of one task must not solve another"


@pytest.mark.parametrize("suite", SUITES)
def test_states_differ_and_nothing_is_solved_at_the_start(suite: str) -> None:
    env = make_env(suite, 0, image_size=32)
    images = [env.reset(state, 0).images for state in range(20)]
    assert len({image.tobytes() for image in images}) == 20
    for state in range(20):
        env.reset(state, 0)
        still = env.step_chunk(np.zeros((1, env.task.action_dim), np.float32))
        assert not still.successes.any()

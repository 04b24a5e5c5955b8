"""The machines on what a simulator really says: scripted episodes walk them to the end, a lost cube is noticed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlvla.envs import make_env
from rlvla.envs.base import Env
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.rewards import EpisodeStart, RewardConfig, RewardPlan
from rlvla.rewards.compose import EpisodeRewards

STATES = {"Lift": ["u0", "u1", "u2"], "Stack": ["u0", "u1", "u2", "u3", "u4"]}


def play(env: Env, init_state_id: int, disturb: Callable[[EpisodeRewards], None]) -> tuple[EpisodeRewards, float]:
    """One scripted episode, step by step; the rewards and their sum."""
    expert = make_expert("robosuite", env.task.task_id, ExpertConfig())
    expert.reset(np.random.default_rng(0))
    observation = env.reset(init_state_id, 0)
    plan = RewardPlan.from_config(RewardConfig(reward=("success", "rm"), rm_mode="progression"))
    assert plan.problems([env.task]) == []
    rewards = plan.begin(env.task, EpisodeStart(observation, init_state_id, 0))
    total = 0.0
    while True:
        result = env.step_chunk(expert.act(env.privileged_state())[None])
        total += sum(float(component.sum()) for component in rewards.score_chunk(result).values())
        disturb(rewards)
        if result.terminated or result.truncated:
            return rewards, total


@pytest.fixture(params=["Lift", "Stack"])
def env(request: pytest.FixtureRequest) -> Env:
    pytest.importorskip("robosuite", reason="the extra robosuite is not installed")
    from rlvla.envs import list_tasks

    task_id = next(task.task_id for task in list_tasks("robosuite") if task.name == request.param)
    made = make_env("robosuite", task_id, cameras=(), max_steps=200)
    yield made
    made.close()


def test_a_scripted_episode_walks_the_machine_to_its_end(env: Env) -> None:
    rewards, total = play(env, 0, lambda _: None)
    states = rewards.source("rm").states
    assert list(dict.fromkeys(states)) == STATES[env.task.name], "in this order, none left out"
    assert states == sorted(states), "never back"
    assert total == pytest.approx(1.0 + 1.0 + 0.25 * (len(STATES[env.task.name]) - 1))


def test_a_cube_that_is_taken_away_triggers_the_validator(env: Env) -> None:
    cube = env._sim.env.cube if env.task.name == "Lift" else env._sim.env.cubeA
    seen: list[str] = []

    def take_away_once(rewards: EpisodeRewards) -> None:
        seen.append(rewards.source("rm").machine.state)
        if seen.count("u1") == 1 and seen[-1] == "u1":
            env._sim.data.joint(cube.joints[0]).qpos[:2] += 0.25

    rewards, _ = play(env, 0, take_away_once)
    machine = rewards.source("rm").machine
    first = seen.index("u1")
    assert machine.regressions >= 1 and "u0" in seen[first:]
    assert seen[first : first + 5] == ["u1"] * 5 and seen[first + 5] == "u0", "after a quarter of a second"

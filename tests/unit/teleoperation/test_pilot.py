"""A policy of the page acts as in a rollout: its observations, its random numbers, its chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlvla.envs.config import EnvConfig
from rlvla.envs.registry import make_env
from rlvla.envs.workers.pool import EnvPool
from rlvla.rewards import StateInput
from rlvla.rewards.state_input import StateInputSettings
from rlvla.rollout import EpisodeRequest, RolloutEngine
from rlvla.teleoperation.pilot import Pilot
from rlvla.utils.errors import RunEnded
from tests.support.policies import ScriptedPolicy

ENV = EnvConfig(task_suite_name="toy_reach", use_proprio=True, max_steps=10)
(TASK,) = ENV.tasks()
REQUEST = EpisodeRequest("toy_reach", 0, 5, 2, "u")  # it passes over the disc


class Wandering(ScriptedPolicy):
    """Random actions larger than the limit; `seen` are its observations."""

    def __init__(self, proprio_dim: int) -> None:
        super().__init__(3, 2)
        self.spec = replace(self.spec, proprio_dim=proprio_dim)
        self.seen: list[tuple[list[float], str]] = []

    def actions(self, images: np.ndarray, proprio: np.ndarray | None, noise: np.ndarray | None) -> np.ndarray:
        assert noise is not None
        return 4 * noise.reshape(-1, 3, 2) - 2

    def act(self, images, proprio, instructions, **sampling):
        self.seen.append(([] if proprio is None else proprio[0].tolist(), instructions[0]))
        return super().act(images, proprio, instructions, **sampling)


@pytest.mark.parametrize(("form", "width"), [("none", 0), ("prompt", 0), ("proprio", 3)])
def test_an_episode_without_interventions_is_a_rollout(form: str, width: int) -> None:
    state_input = None if form == "none" else StateInput(StateInputSettings(form, width))
    policies = [Wandering(2 + width), Wandering(2 + width)]
    with EnvPool(1) as pool:
        engine = RolloutEngine(pool, ENV.env_kwargs(), {"success": 1.0}, tasks=[TASK], state_input=state_input)
        (sample,) = engine.run([REQUEST], policies[0], temperature=1.5)
    pilot = Pilot(policies[1], 1.5, state_input)
    env = make_env("toy_reach", 0, **ENV.env_kwargs(), object_state=True)  # which the policy does not read
    pilot.begin(TASK, REQUEST.seed)
    observation, actions = env.reset(REQUEST.init_state_id, REQUEST.seed), []
    for _ in range(sample.finish_step):
        if pilot.needs_decision:
            pilot.decide(observation)
        actions.append(pilot.take())
        result = env.step_chunk(actions[-1][None])
        pilot.follow(result)
        observation = result.observation
    np.testing.assert_array_equal(actions, np.clip(sample.played_actions.numpy(), -1, 1))
    assert np.abs(actions).max() == 1 and policies[0].seen == policies[1].seen and len(policies[0].seen) > 2
    stages = [instruction[-2:] for _, instruction in policies[1].seen]
    assert form != "prompt" or stages == ["u0", "u0", "u1", "u2"]


def test_damaged_actions_end_the_command() -> None:
    class Damaged(Wandering):
        def actions(self, *observed) -> np.ndarray:
            return super().actions(*observed) * np.nan

    pilot = Pilot(Damaged(2), 1.0)
    pilot.begin(TASK, 0)
    with pytest.raises(RunEnded, match="NaN or infinity"):
        pilot.decide(make_env("toy_reach", 0, **ENV.env_kwargs()).reset(0, 0))

"""A custom suite: `toy_reach` whose proprio holds the way to the named disc, so that no image is needed."""

from dataclasses import replace

import numpy as np

from rlvla.envs.base import Observation, TaskSpec, task_of
from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.toy_reach.env import CAMERAS, Scene, ToyReachEnv, ToyReachOptions, make
from rlvla.envs.toy_reach.env import list_tasks as list_reach

NAME = "state_reach"


class StateReach(ToyReachEnv):
    """Proprio [4]: the effector, and the named disc's center."""

    def _observe(self, scene: Scene) -> Observation:
        seen = super()._observe(scene)
        state = np.concatenate([scene.effector, scene.centers[scene.target]]).astype(np.float32)
        return replace(seen, proprio=state if self.use_proprio else None, instruction=self.task.instruction)


def list_tasks(**options) -> list[TaskSpec]:
    return [replace(task, suite=NAME, proprio_dim=4, instruction="reach the disc") for task in list_reach(**options)]


def make_state_reach(task_id: int, **options) -> StateReach:
    env = make(task_id, **options)
    env.__class__ = StateReach
    env.task = task_of(NAME, list_tasks(**options), task_id)
    return env


register_suite(NAME, Suite(list_tasks=list_tasks, make=make_state_reach, cameras=CAMERAS, options=ToyReachOptions))

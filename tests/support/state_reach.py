"""Custom suites: `toy_reach` whose proprio holds the way to the named disc, always or where an option says so."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rlvla.envs.base import Observation, TaskSpec, task_of
from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.toy_reach.env import CAMERAS, Scene, ToyReachEnv, ToyReachOptions, make
from rlvla.envs.toy_reach.env import list_tasks as list_reach
from rlvla.envs.toy_reach.expert import ToyReachExpert
from rlvla.utils.cli.flags import arg

NAME, HIDDEN = "state_reach", "hidden_reach"


class StateReach(ToyReachEnv):
    """Proprio [4]: the effector, and the named disc's center."""

    def _observe(self, scene: Scene) -> Observation:
        seen = super()._observe(scene)
        state = np.concatenate([scene.effector, scene.centers[scene.target]]).astype(np.float32)
        return replace(seen, proprio=state if self.use_proprio else None, instruction=self.task.instruction)


@dataclass(frozen=True)
class StateReachOptions(ToyReachOptions):
    """Nothing is left to be shown."""

    privileged_options: ClassVar[tuple[str, ...]] = ()


def list_tasks(**options) -> list[TaskSpec]:
    return [replace(task, suite=NAME, proprio_dim=4, instruction="reach the disc") for task in list_reach(**options)]


def make_state_reach(task_id: int, **options) -> StateReach:
    env = make(task_id, **options)
    env.__class__ = StateReach
    env.task = task_of(NAME, list_tasks(**options), task_id)
    return env


@dataclass(frozen=True)
class HiddenReachOptions(ToyReachOptions):
    """With `disc_state`, proprio [2] is followed by the center of the named disc."""

    privileged_options: ClassVar[tuple[str, ...]] = ("disc_state",)
    disc_state: bool = arg(False, "append the center of the named disc to proprio")


class HiddenReach(ToyReachEnv):
    """Proprio [2] or [4]: the effector, and perhaps the named disc's center."""

    shows_disc: bool

    def _observe(self, scene: Scene) -> Observation:
        seen = super()._observe(scene)
        state = [scene.effector, *([scene.centers[scene.target]] if self.shows_disc else [])]
        return replace(seen, proprio=np.concatenate(state).astype(np.float32) if self.use_proprio else None)


def list_hidden(disc_state: bool = False, **options) -> list[TaskSpec]:
    return [replace(task, suite=HIDDEN, proprio_dim=4 if disc_state else 2) for task in list_reach(**options)]


def make_hidden_reach(task_id: int, disc_state: bool = False, **options) -> HiddenReach:
    env = make(task_id, **options)
    env.__class__, env.shows_disc = HiddenReach, disc_state
    env.task = task_of(HIDDEN, list_hidden(disc_state, **options), task_id)
    return env


register_suite(
    HIDDEN,
    Suite(
        list_hidden,
        make_hidden_reach,
        CAMERAS,
        expert=lambda task, config: ToyReachExpert(config),
        options=HiddenReachOptions,
    ),
)
register_suite(NAME, Suite(list_tasks=list_tasks, make=make_state_reach, cameras=CAMERAS, options=StateReachOptions))

"""What the environment itself pays: the simulator's native reward, and named terms beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlvla.rewards.base import EpisodeStart, StepInfo, register_reward
from rlvla.utils.errors import Problem

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.rewards.config import RewardConfig

AFFORDANCE = "affordance"


@register_reward("env")
class EnvironmentSource:
    """Passes through the simulator's reward, `ChunkResult.rewards`."""

    def __init__(self, config: RewardConfig):
        """The source has no settings."""

    def create(self, task: TaskSpec, episode: EpisodeStart) -> EnvironmentReward:
        """The reward of one episode."""
        return EnvironmentReward()


@register_reward(AFFORDANCE)
class AffordanceSource:
    """Pays the environment's component `affordance`: 0 if a primitive suits the objects around it, else negative."""

    def __init__(self, config: RewardConfig):
        """The source has no settings."""

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Tasks without such a component."""
        return [
            Problem(
                "reward",
                "unavailable",
                f"--reward {AFFORDANCE}: {task.suite} task {task.name} has no affordances as it is played here "
                "(robosuite has them with --action_space primitives)",
            )
            for task in tasks
            if AFFORDANCE not in task.reward_components
        ]

    def create(self, task: TaskSpec, episode: EpisodeStart) -> EnvironmentReward:
        """The reward of one episode."""
        return EnvironmentReward(AFFORDANCE)


class EnvironmentReward:
    """A reward of the environment during one episode.

    Args:
        component: name of the component; None: the simulator's reward.
    """

    def __init__(self, component: str | None = None):
        self._component = component

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> float:
        """The reward of the step."""
        return info.reward if self._component is None else info.components[self._component]

    def finish(self) -> dict[str, Any]:
        """There are no late rewards."""
        return {}

    def release(self) -> None:
        """Nothing to free."""

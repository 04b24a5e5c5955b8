"""Rewards of the environment: the simulator's native reward, its changes, and named terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlvla.rewards.base import EpisodeReward, EpisodeStart, StepInfo, register_reward
from rlvla.utils.errors import Problem

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.rewards.config import RewardConfig

AFFORDANCE = "affordance"


@register_reward("env", reads_images=False)
class EnvironmentSource:
    """Passes through the simulator's reward, `ChunkResult.rewards`."""

    def __init__(self, config: RewardConfig):
        """The source has no settings."""

    def create(self, task: TaskSpec, episode: EpisodeStart) -> EnvironmentReward:
        """The reward of one episode."""
        return EnvironmentReward()


@register_reward("env_progress", reads_images=False)
class EnvironmentProgressSource:
    """Pays changes of the simulator's reward, as a share of its range.

    Over an episode they add up to where it ended, so that an early success costs nothing. With `env`, a dense reward
    pays for every step near the goal, and success, which ends the episode, may lose more than it gains.
    """

    def __init__(self, config: RewardConfig):
        """The source has no settings."""

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Tasks whose rewards have no known range."""
        why = "does not declare the range of its rewards (TaskSpec.reward_range)"
        return [_unavailable("env_progress", task, why) for task in tasks if _range(task) is None]

    def create(self, task: TaskSpec, episode: EpisodeStart) -> EnvironmentProgress:
        """The reward of one episode."""
        width = _range(task)
        assert width is not None, "see problems()"
        return EnvironmentProgress(width)


def _unavailable(source: str, task: TaskSpec, why: str) -> Problem:
    return Problem("reward", "unavailable", f"--reward {source}: {task.suite} task {task.name} {why}")


def _range(task: TaskSpec) -> float | None:
    """Width of the range of a task's rewards; None if it is unknown or 0."""
    return None if task.reward_range is None else (task.reward_range[1] - task.reward_range[0]) or None


@register_reward(AFFORDANCE, reads_images=False)
class AffordanceSource:
    """Pays the environment's component `affordance`: 0 if a primitive suits the objects around it, else negative."""

    def __init__(self, config: RewardConfig):
        """The source has no settings."""

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Tasks without such a component."""
        why = "has no affordances as it is played here (robosuite has them with --action_space primitives)"
        return [_unavailable(AFFORDANCE, task, why) for task in tasks if AFFORDANCE not in task.reward_components]

    def create(self, task: TaskSpec, episode: EpisodeStart) -> EnvironmentReward:
        """The reward of one episode."""
        return EnvironmentReward(AFFORDANCE)


class EnvironmentReward(EpisodeReward):
    """A reward of the environment during one episode.

    Args:
        component: name of the component; None: the simulator's reward.
    """

    def __init__(self, component: str | None = None):
        self._component = component

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> float:
        """The reward of the step."""
        return info.reward if self._component is None else info.components[self._component]


class EnvironmentProgress(EnvironmentReward):
    """Changes of the simulator's reward during one episode; 0 at the first step.

    Args:
        scale: divisor of a change.
    """

    def __init__(self, scale: float):
        super().__init__()
        self._scale = scale
        self._before: float | None = None

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> float:
        """The change since the previous step."""
        reward = super().step(observation, events, info)
        before, self._before = self._before, reward
        return 0.0 if before is None else (reward - before) / self._scale

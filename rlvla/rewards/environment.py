"""The simulator's native reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvla.rewards.base import EpisodeStart, StepInfo, register_reward

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.rewards.config import RewardConfig


@register_reward("env")
class EnvironmentSource:
    """Passes through the simulator's reward, `ChunkResult.rewards`."""

    def __init__(self, config: RewardConfig):
        """The source has no settings."""

    def create(self, task: TaskSpec, episode: EpisodeStart) -> EnvironmentReward:
        """The reward of one episode."""
        return EnvironmentReward()


class EnvironmentReward:
    """The simulator's reward during one episode."""

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> float:
        """The reward of the step."""
        return info.reward

    def finish(self) -> dict[str, Any]:
        """There are no late rewards."""
        return {}

    def release(self) -> None:
        """Nothing to free."""

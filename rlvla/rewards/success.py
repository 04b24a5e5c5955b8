"""The verifier: 1 at the step at which the episode terminates with success held, else 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlvla.rewards.base import StepInfo, register_reward

if TYPE_CHECKING:
    from rlvla.envs.base import TaskSpec


@register_reward("success")
class SuccessReward:
    """Sparse success. An episode that is truncated while success is not yet held gets nothing."""

    def __init__(self, task: TaskSpec):
        self.task = task

    def step(self, info: StepInfo) -> float:
        """1.0 on termination (environments terminate only on success that was held)."""
        return 1.0 if info.terminated and info.success else 0.0

    def release(self) -> None:
        """Nothing is held."""

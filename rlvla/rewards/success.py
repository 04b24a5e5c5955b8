"""Sparse success reward, given once per episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvla.options import arg
from rlvla.rewards.base import EpisodeReward, EpisodeStart, StepInfo, register_reward

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec


@dataclass(frozen=True)
class SuccessOptions:
    """Size and time of the success reward."""

    reward_coef: float = arg(1.0, "reward of success (SimpleVLA-RL: 5)")
    success_reward: str = arg(
        "at_end",
        "pay success held until the episode terminates (at_end), or the first successful step (once)",
        choices=("at_end", "once"),
    )


@register_reward("success", options=SuccessOptions, reads_images=False)
class SparseSuccessSource:
    """Sparse success reward of `reward_coef`; `success_reward` selects when it is given."""

    def __init__(self, options: SuccessOptions):
        self._coef, self._when = options.reward_coef, options.success_reward

    def create(self, task: TaskSpec, episode: EpisodeStart) -> SuccessReward:
        """The reward of one episode."""
        return SuccessReward(self._coef, once=self._when == "once")


class SuccessReward(EpisodeReward):
    """Success reward of one episode.

    Args:
        coef: the reward.
        once: reward the first successful step; otherwise the step at which the episode terminates with success held,
            so that failed and truncated episodes get nothing.
    """

    def __init__(self, coef: float, *, once: bool):
        self._coef, self._once = coef, once
        self._before, self._paid, self._regressions = False, False, 0

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> float:
        """`coef` at the rewarded step, else 0."""
        self._regressions += self._before and not info.success
        self._before = info.success
        counts = info.success and (self._once or info.terminated)
        if not counts or self._paid:
            return 0.0
        self._paid = True
        return self._coef

    def finish(self) -> dict[str, Any]:
        """`regressions`: how often success was lost again."""
        return {"regressions": self._regressions}

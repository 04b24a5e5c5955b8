"""A penalty for the last steps before the step limit (soft overlong punishment, DAPO: Yu et al. 2025, equation 13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvla.options import arg
from rlvla.rewards.base import EpisodeReward, EpisodeStart, StepInfo, register_reward
from rlvla.utils.errors import Problem

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec


OVERLONG = "overlong"


@dataclass(frozen=True)
class OverlongOptions:
    """Length and size of the penalty."""

    overlong_buffer_len: int = arg(
        0, "number of environment steps before the step limit that are penalized; 0: no penalty", minimum=0
    )
    overlong_penalty_factor: float = arg(
        1.0,
        "penalty of an episode that reaches the step limit, linear in its last --overlong_buffer_len steps",
        above=0,
    )


@register_reward(OVERLONG, own_flag="overlong_buffer_len", options=OverlongOptions, reads_images=False)
class OverlongSource:
    """Each of the last `overlong_buffer_len` steps before the limit costs `overlong_penalty_factor` / that number.

    Over an episode this adds up to the penalty of the paper, linear in the number of steps.
    """

    def __init__(self, options: OverlongOptions):
        self._steps, self._factor = options.overlong_buffer_len, options.overlong_penalty_factor

    def create(self, task: TaskSpec, episode: EpisodeStart) -> OverlongPenalty:
        """The penalty of one episode."""
        return OverlongPenalty(task.max_steps - self._steps, self._factor / self._steps)

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Tasks whose step limit is smaller than the number of steps to penalize."""
        shortest = min((task.max_steps for task in tasks), default=self._steps)
        if self._steps <= shortest:
            return []
        text = f"--overlong_buffer_len {self._steps} exceeds the step limit of {shortest}; give at most that"
        return [Problem("overlong_buffer_len", "out_of_range", text)]


class OverlongPenalty(EpisodeReward):
    """The penalty of one episode.

    Args:
        free: steps without penalty.
        cost: penalty of each further step.
    """

    def __init__(self, free: int, cost: float):
        self._free, self._cost, self._steps = free, cost, 0

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> float:
        """0 for a free step, minus the cost for the others."""
        self._steps += 1
        return -self._cost if self._steps > self._free else 0.0

    def finish(self) -> dict[str, Any]:
        """`steps`: how many steps were penalized."""
        return {"steps": max(0, self._steps - self._free)}

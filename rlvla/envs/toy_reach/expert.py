"""Scripted expert for `toy_reach`: a proportional controller toward the named disc."""

from __future__ import annotations

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.envs.experts.base import ExpertConfig, disturb, draw_offset
from rlvla.envs.toy_reach.env import STEP_SIZE
from rlvla.utils.errors import ConfigError


class ToyReachExpert:
    """Moves straight to the center of the disc (plus the episode's offset) and stays there.

    Args:
        config: deviations from the best behavior. `gripper_shift` must be 0, because there is no gripper.

    Raises:
        ConfigError: `gripper_shift` is not 0.
    """

    def __init__(self, config: ExpertConfig):
        if config.gripper_shift != 0:
            raise ConfigError(f"toy_reach has no gripper: gripper_shift must be 0, not {config.gripper_shift}")
        self.config = config
        self._rng: np.random.Generator | None = None
        self._offset = np.zeros(2)

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode and draw its offset. `rng` also generates the action noise."""
        self._rng = rng
        self._offset = draw_offset(self.config, rng)

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Velocity [2] float32 straight toward the target, as fast as the per-axis limits allow."""
        if self._rng is None:
            raise RuntimeError("call reset before act")
        error = state["target"] + self._offset - state["effector"]
        velocity = error / STEP_SIZE
        velocity /= max(1.0, np.abs(velocity).max())  # keep the direction, so that it points to the target
        return disturb(velocity, slice(0, 2), self.config, self._rng)


def make_toy_reach_expert(task: TaskSpec, config: ExpertConfig) -> ToyReachExpert:
    """Create the expert of the only task."""
    return ToyReachExpert(config)

"""The scripted expert of `toy_reach`: a proportional controller towards the named disc."""

from __future__ import annotations

import numpy as np

from rlvla.envs.experts.base import ExpertConfig, disturb, draw_offset
from rlvla.envs.toy_reach import STEP_SIZE
from rlvla.utils.errors import ConfigError


class ToyReachExpert:
    """Moves straight to the centre of the disc (plus the episode's offset) and stays there.

    Args:
        config: how far it departs from that. There is no gripper, so `gripper_shift` must be 0.

    Raises:
        ConfigError: a non-zero `gripper_shift`.
    """

    def __init__(self, config: ExpertConfig):
        if config.gripper_shift != 0:
            raise ConfigError(f"toy_reach has no gripper: gripper_shift must be 0, not {config.gripper_shift}")
        self.config = config
        self._rng: np.random.Generator | None = None
        self._offset = np.zeros(2)

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode; draws its offset. The noise of the episode comes from `rng` too."""
        self._rng = rng
        self._offset = draw_offset(self.config, rng)

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """The velocity [2] float32 straight to the target, as fast as the speed limit of each direction allows."""
        if self._rng is None:
            raise RuntimeError("call reset before act")
        error = state["target"] + self._offset - state["effector"]
        velocity = error / STEP_SIZE
        velocity /= max(1.0, np.abs(velocity).max())  # a straight line: the direction shows where the target is
        return disturb(velocity, slice(0, 2), self.config, self._rng)

"""What the experts of tasks on a table share: checks, and the offset of an episode."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rlvla.envs.experts.base import ExpertConfig, disturb, draw_offset
from rlvla.utils.errors import ConfigError


class TableExpert:
    """An expert whose actions are velocities in the plane; a suite writes `_velocity`.

    Args:
        config: deviations from the best behavior. `gripper_shift` must be 0, because there is no gripper.

    Raises:
        ConfigError: `gripper_shift` is not 0.
    """

    suite: ClassVar[str]

    def __init__(self, config: ExpertConfig):
        if config.gripper_shift != 0:
            raise ConfigError(f"{self.suite} has no gripper: gripper_shift must be 0, not {config.gripper_shift}")
        self.config = config
        self._rng: np.random.Generator | None = None
        self._offset = np.zeros(2)

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode and draw its offset. `rng` also generates the action noise."""
        self._rng = rng
        self._offset = draw_offset(self.config, rng)

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Velocity [2] float32, as fast as the per-axis limits allow."""
        if self._rng is None:
            raise RuntimeError("call reset before act")
        return disturb(self._velocity(state), slice(0, 2), self.config, self._rng)

    def _velocity(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Velocity [2] in [-1, 1] toward the target plus `_offset`."""
        raise NotImplementedError

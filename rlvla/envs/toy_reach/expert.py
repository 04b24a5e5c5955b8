"""Scripted expert for `toy_reach`: a proportional controller toward the named disc."""

from __future__ import annotations

import numpy as np

from rlvla.envs.experts.base import TableExpert
from rlvla.envs.toy_reach.env import STEP_SIZE


class ToyReachExpert(TableExpert):
    """Moves straight to the center of the disc (plus the episode's offset) and stays there; see `TableExpert`."""

    suite = "toy_reach"

    def _velocity(self, state: dict[str, np.ndarray]) -> np.ndarray:
        error = state["target"] + self._offset - state["effector"]
        velocity = error / STEP_SIZE
        return velocity / max(1.0, np.abs(velocity).max())  # keep the direction, so that it points to the target

"""Between the numbers of the environment and those of a LeRobot policy's network."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from rlvla.models.codec import varying
from rlvla.models.lerobot.processors import Processors


class LeRobotCodec:
    """Normalizes states and actions as the pipelines of a folder do; without padding.

    Args:
        processors: of the folder.
        chunk: (A, D), actions that are executed per decision, and their dimensions.
    """

    def __init__(self, processors: Processors, chunk: tuple[int, int]):
        self._processors, self._chunk = processors, chunk

    def normalize_proprio(self, proprio: Any) -> np.ndarray:
        """[..., P] of the environment -> [..., P] float32."""
        return self._processors.state.normalize(proprio)

    def normalize_actions(self, actions: np.ndarray) -> np.ndarray:
        """[..., D] of the environment -> [..., D] float32."""
        return self._processors.action.normalize(actions)

    def unnormalize_actions(self, actions: np.ndarray) -> np.ndarray:
        """The inverse of `normalize_actions`."""
        return self._processors.action.unnormalize(actions)

    @property
    def effective_numbers(self) -> Tensor:
        """[A*D] bool: numbers in a chunk that can change the action, see `StatisticsCodec`."""
        return varying(self.unnormalize_actions(np.linspace(-1.0, 1.0, 5)[:, None, None] + np.zeros(self._chunk)))

    @property
    def action_mask(self) -> list[bool]:
        """[D]: every dimension is normalized, unless none is."""
        return [self._processors.action.mode != "IDENTITY"] * self._chunk[1]

    def same_states(self, other: LeRobotCodec) -> bool:
        """Whether both normalize every state to the same result."""
        mine, theirs = self._processors.state, other._processors.state
        if (mine.mode, mine.eps) != (theirs.mode, theirs.eps) or mine.statistics.keys() != theirs.statistics.keys():
            return False
        return all(np.array_equal(mine.statistics[name], theirs.statistics[name]) for name in mine.statistics)

"""Batched environments without a simulator: positions and images are arrays over the slots."""

from __future__ import annotations

import numpy as np

from rlvla.envs.base import Observation, TaskSpec
from rlvla.envs.batched_slots import BatchedSlots
from rlvla.envs.options import SuiteOptions


class BatchedTable(BatchedSlots):
    """A tabletop for `num_slots` concurrent episodes.

    A suite writes `_begin`, which draws the background as well, `_advance`, `_paint`, `_position`, `_state` and, if the
    task has several, `_instruction`. The dynamics are deterministic.

    Args:
        task: the task, including the step limit.
        num_slots: number of concurrent episodes.
        options: image size and the other options.
    """

    def __init__(self, task: TaskSpec, num_slots: int, options: SuiteOptions):
        super().__init__(task, num_slots, options)
        size = options.image_size
        self._backgrounds = np.empty((num_slots, size, size, 3), dtype=np.uint8)  # do not change in an episode

    def _paint(self, images: np.ndarray, slots: np.ndarray) -> None:
        """Draw what moves over the backgrounds [n, H, H, 3] of the slots [n], in place."""
        raise NotImplementedError

    def _position(self, slots: np.ndarray) -> np.ndarray:
        """Proprio [n, P] of the slots [n]."""
        raise NotImplementedError

    def _instruction(self, slot: int) -> str:
        return self.task.instruction

    def _frames(self, slots: np.ndarray) -> np.ndarray:
        images = self._backgrounds[slots]
        self._paint(images, slots)
        return images

    def _observe(self, slots: np.ndarray) -> list[Observation]:
        images, proprio = self._frames(slots)[:, None], self._position(slots).astype(np.float32)
        return [
            Observation(images[row], proprio[row] if self._options.use_proprio else None, self._instruction(slot))
            for row, slot in enumerate(slots)
        ]

"""Batched `toy_reach`, bitwise equal to `ToyReachEnv`; a minimal example of a `BatchedTable`."""

from __future__ import annotations

import numpy as np

from rlvla.envs.base import TaskSpec, task_of
from rlvla.envs.batched_slots import BatchedTable
from rlvla.envs.toy_reach.env import (
    COLORS,
    DISC_RADIUS,
    MARKER,
    STEP_SIZE,
    TABLE,
    VIEW,
    ToyReachOptions,
    initial_scene,
    judge,
    list_tasks,
    paint_disc,
)


def paint_discs(images: np.ndarray, centers: np.ndarray, radius: float, color: tuple[int, int, int]) -> None:
    """Vectorized `paint_disc`: draw a disc of the same size and color in each image, in place.

    Args:
        images: [n, H, H, 3] uint8.
        centers: [n, 2] centers in table coordinates.
        radius: radius in table units.
        color: RGB in 0..255.
    """
    size = images.shape[1]
    scale = size / (2 * VIEW)  # pixels per table unit
    reach = radius * scale + 0.5
    width = np.arange(int(2 * reach) + 3)
    column, row = (centers[:, 0] + VIEW) * scale - 0.5, (VIEW - centers[:, 1]) * scale - 0.5
    # Equally sized windows that contain the disc. Past the edge of an image they repeat its last pixel.
    rows = np.clip((row - reach).astype(np.int64)[:, None] + width, 0, size - 1)  # [n, w]
    columns = np.clip((column - reach).astype(np.int64)[:, None] + width, 0, size - 1)
    d_row = rows.astype(np.float32) - row.astype(np.float32)[:, None]
    d_column = columns.astype(np.float32) - column.astype(np.float32)[:, None]
    distance = np.sqrt(d_row[:, :, None] ** 2 + d_column[:, None, :] ** 2)
    coverage = np.clip(np.float32(reach) - distance, 0.0, 1.0)[..., None]
    where = np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]
    patch = images[where]
    images[where] = (patch + coverage * (np.array(color, dtype=np.float32) - patch) + np.float32(0.5)).astype(np.uint8)


class BatchedToyReach(BatchedTable):
    """`ToyReachEnv` for `num_slots` concurrent episodes; arguments as in `BatchedTable`."""

    def __init__(self, task: TaskSpec, num_slots: int, options: ToyReachOptions):
        super().__init__(task, num_slots, options)
        self._shows_objects = options.object_state
        self._effectors = np.zeros((num_slots, 2))
        self._discs = np.zeros((num_slots, len(COLORS), 2))
        self._targets = np.zeros((num_slots, 2))
        self._instructions = [""] * num_slots

    def _begin(self, slot: int, init_state_id: int) -> None:
        scene = initial_scene(init_state_id)
        self._effectors[slot], self._discs[slot] = scene.effector, scene.centers
        self._targets[slot] = scene.centers[scene.target]
        self._instructions[slot] = self.task.instruction.format(color=scene.colors[scene.target])
        self._backgrounds[slot] = TABLE
        for color, center in zip(scene.colors, scene.centers):
            paint_disc(self._backgrounds[slot], center, DISC_RADIUS, COLORS[color])

    def _advance(self, slots: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, list[frozenset[str]]]:
        self._effectors[slots] = np.clip(self._effectors[slots] + STEP_SIZE * actions, -1.0, 1.0)
        return judge(self._effectors[slots], self._targets[slots])

    def _paint(self, images: np.ndarray, slots: np.ndarray) -> None:
        for radius, color in MARKER:
            paint_discs(images, self._effectors[slots], radius, color)

    def _position(self, slots: np.ndarray) -> np.ndarray:
        effectors = self._effectors[slots]
        return np.concatenate([effectors, self._targets[slots]], 1) if self._shows_objects else effectors

    def _state(self, slot: int) -> dict[str, np.ndarray]:
        return {
            "effector": self._effectors[slot].copy(),
            "target": self._targets[slot].copy(),
            "discs": self._discs[slot].copy(),
        }

    def _instruction(self, slot: int) -> str:
        return self._instructions[slot]


def make_batched(task_id: int, num_slots: int, **kw) -> BatchedToyReach:
    """Create the environment; `kw` are the fields of `ToyReachOptions`."""
    return BatchedToyReach(task_of("toy_reach", list_tasks(**kw), task_id), num_slots, ToyReachOptions(**kw))

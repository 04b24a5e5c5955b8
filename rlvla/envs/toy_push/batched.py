"""Batched `toy_push`, bitwise equal to `ToyPushEnv`."""

from __future__ import annotations

import numpy as np

from rlvla.envs.base import TaskSpec, task_of
from rlvla.envs.batched_slots import BatchedTable
from rlvla.envs.toy_push.env import (
    MARKER,
    OBJECTS,
    STATE_NAMES,
    ToyPushOptions,
    initial_scene,
    judge,
    list_tasks,
    named,
    paint_background,
    state_of,
)
from rlvla.envs.toy_push.physics import ARRAYS, OBJECT_RADIUS, STEP_SIZE, push
from rlvla.envs.toy_reach.batched import paint_discs


class BatchedToyPush(BatchedTable):
    """`ToyPushEnv` for `num_slots` concurrent episodes; arguments as in `BatchedTable`."""

    def __init__(self, task: TaskSpec, num_slots: int, options: ToyPushOptions):
        super().__init__(task, num_slots, options)
        self._shows_objects = options.object_state
        self._object, self._zone = named(task)
        self._positions = np.zeros((num_slots, 6))
        self._zones = [(0.0, 0.0)] * num_slots

    def _begin(self, slot: int, init_state_id: int) -> None:
        scene = initial_scene(init_state_id)
        self._positions[slot], self._zones[slot] = scene.positions, scene.zones[self._zone]
        paint_background(self._backgrounds[slot], scene.zones)

    def _advance(self, slots: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, list[frozenset[str]]]:
        moves = STEP_SIZE * actions
        moved = push(tuple(self._positions[slots].T), moves[:, 0], moves[:, 1], ARRAYS)
        self._positions[slots] = np.stack(moved, axis=1)
        judged = [judge(tuple(self._positions[slot].tolist()), self._object, self._zones[slot]) for slot in slots]
        return np.array([success for success, _ in judged]), [events for _, events in judged]

    def _paint(self, images: np.ndarray, slots: np.ndarray) -> None:
        centers = self._positions[slots].reshape(-1, 3, 2)
        for index, color in enumerate(OBJECTS.values()):
            paint_discs(images, centers[:, 1 + index], OBJECT_RADIUS, color)
        for radius, color in MARKER:
            paint_discs(images, centers[:, 0], radius, color)

    def _position(self, slots: np.ndarray) -> np.ndarray:
        if not self._shows_objects:
            return self._positions[slots, :2]
        return np.stack([np.concatenate([self._state(slot)[name] for name in STATE_NAMES]) for slot in slots])

    def _state(self, slot: int) -> dict[str, np.ndarray]:
        return state_of(self._positions[slot].copy(), self._object, self._zones[slot])


def make_batched(task_id: int, num_slots: int, **kw) -> BatchedToyPush:
    """Create the environment; `kw` are the fields of `ToyPushOptions`."""
    return BatchedToyPush(task_of("toy_push", list_tasks(**kw), task_id), num_slots, ToyPushOptions(**kw))

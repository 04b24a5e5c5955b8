"""`pick_place`: carry the named object to the named pad in the plane, with a gripper that opens and closes.

The defaults of `recipes/own_task.yaml` were not chosen on this suite; `benchmarks/learning.py` runs the recipe on it as
on an environment of a user's own. Two square objects (orange, purple), two round pads (white, green) and the gripper, a
ring that is dark when open and red when closed. The gripper carries an object once it closes within 0.07 of its center.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.suites.planar import (
    DARK,
    OBJECTS,
    RED,
    Canvas,
    PlanarOptions,
    PlanarTask,
    register_planar_suite,
)

PADS = {"white": (250, 250, 250), "green": (60, 150, 80)}
STEP_SIZE = 0.1
_OBJECT, _PAD, _RING = 0.1, 0.17, 0.09  # half sides and radii
_GRASP, _PLACED = 0.07, 0.1
_APART = 0.42


class PickPlace(PlanarTask):
    """Two objects, two pads and a gripper."""

    texts = {
        f"{color}_on_{pad}": f"put the {color} block on the {pad} pad"
        for color, pad in ((color, pad) for color in OBJECTS for pad in PADS)
    }
    action_dim, proprio_dim = 3, 3

    def reset(self, rng: np.random.Generator) -> None:
        """See `PlanarTask`; objects and pads are apart from each other."""
        while True:
            positions = rng.uniform(-0.8, 0.8, (5, 2))
            distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1) + 9 * np.eye(5)
            if distances[1:, 1:].min() >= _APART:
                break
        self.effector, self._objects, self._pads = positions[0], positions[1:3], positions[3:]
        self._object, self._pad = divmod(self.task_id, len(PADS))
        self._closed, self._carried = False, -1

    def advance(self, action: np.ndarray) -> bool:
        """See `PlanarTask`."""
        self.effector = np.clip(self.effector + STEP_SIZE * action[:2].astype(np.float32), -1, 1)
        closes = bool(action[2] > 0)
        if closes and not self._closed:
            near = np.linalg.norm(self._objects - self.effector, axis=1)
            self._carried = int(near.argmin()) if near.min() <= _GRASP else -1
        elif not closes:
            self._carried = -1
        self._closed = closes
        if self._carried >= 0:
            self._objects[self._carried] = self.effector
        placed = np.linalg.norm(self._objects[self._object] - self._pads[self._pad]) <= _PLACED
        return bool(placed and self._carried < 0)

    def draw(self, canvas: Canvas) -> None:
        """See `PlanarTask`."""
        for center, color in zip(self._pads, PADS.values()):
            canvas.disc(center, _PAD, color)
        for center, color in zip(self._objects, OBJECTS.values()):
            canvas.box(center, (_OBJECT, _OBJECT), color)
        canvas.ring(self.effector, _RING, RED if self._closed else DARK)

    def state(self) -> dict[str, np.ndarray]:
        """See `PlanarTask`."""
        carrying = np.array([self._carried == self._object])
        named, pad = self._objects[self._object], self._pads[self._pad]
        return {"gripper": self.effector, "object": named, "pad": pad, "carrying": carrying}

    @staticmethod
    def expert(state: Mapping[str, np.ndarray], offset: np.ndarray) -> np.ndarray:
        """To the object, close, to the pad, open."""
        carrying = bool(state["carrying"][0])
        if not carrying and np.linalg.norm(state["object"] - state["pad"]) <= _PLACED:
            return np.array([0.0, 0.0, -1.0], np.float32)
        goal = state["pad"] + offset if carrying else state["object"]
        way = (goal - state["gripper"]) / STEP_SIZE
        there = np.linalg.norm(way) * STEP_SIZE <= 0.04
        way /= max(1.0, abs(way).max())
        closed = there if not carrying else not there
        return np.array([*way, 1.0 if closed else -1.0])

    def proprio(self) -> np.ndarray:
        """Position and gripper."""
        return np.array([*self.effector, float(self._closed)])


@dataclass(frozen=True)
class PickPlaceOptions(PlanarOptions):
    """Options of the suite."""

    max_steps: int = 50
    success_hold_steps: int = 3


register_planar_suite("pick_place", PickPlace, PickPlaceOptions)

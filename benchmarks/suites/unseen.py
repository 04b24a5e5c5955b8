"""Tasks for which nothing is tuned: `lever`, `slot` and `sort_two`, tried once a recipe is final.

`lever`: push the tip of a rod, which turns about its end, to the named mark. `slot`: turn a held block and insert it
into the named slot of a wall. `sort_two`: carry both blocks to their pads, in the order of the instruction. See
`benchmarks/suites/planar.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.suites.planar import (
    DARK,
    EFFECTOR,
    OBJECTS,
    RED,
    Canvas,
    PlanarTask,
    apart,
    register_planar_suite,
    toward,
)

MARKS = {"white": (250, 250, 250), "green": (60, 150, 80)}


def angle_between(a: float, b: float) -> float:
    """The angle from a to b in [-pi, pi)."""
    return (b - a + np.pi) % (2 * np.pi) - np.pi


class Lever(PlanarTask):
    """A rod that turns about a pivot while the effector pushes its side, and two marks on the circle of its tip."""

    texts = {color: f"turn the lever to the {color} mark" for color in MARKS}
    _STEP, _LENGTH, _TOUCH, _AIM = 0.08, 0.5, 0.11, 0.12

    def reset(self, rng: np.random.Generator) -> None:
        """See `PlanarTask`."""
        self._pivot = rng.uniform(-0.25, 0.25, 2)
        self._angle = rng.uniform(-np.pi, np.pi)
        sides = rng.permutation([-1, 1])
        self._marks = self._angle + sides * rng.uniform(0.5, 1.2, 2)
        while True:
            self.effector = rng.uniform(-0.9, 0.9, 2)
            if self._side()[0] >= 0.2:
                break

    def _side(self) -> tuple[float, float, float]:
        """Distance of the effector from the rod, its position along it, and the side (sign) on which it is."""
        way = self.effector - self._pivot
        axis = np.array([np.cos(self._angle), np.sin(self._angle)])
        along, across = float(way @ axis), float(axis[0] * way[1] - axis[1] * way[0])
        rest = along - np.clip(along, 0, self._LENGTH)
        return float(np.hypot(rest, across)), along, float(np.sign(across))

    def advance(self, action: np.ndarray) -> bool:
        """See `PlanarTask`."""
        for _ in range(4):
            _, _, side = self._side()
            self.effector = np.clip(self.effector + self._STEP / 4 * action, -1, 1)
            distance, along, now = self._side()
            if distance < self._TOUCH or (now != side and 0 < along < self._LENGTH):
                if along < 0.1:  # at the pivot, which does not move: it is pushed back
                    self.effector = self.effector - self._STEP / 4 * action
                else:
                    way = self.effector - self._pivot
                    bearing, radius = np.arctan2(way[1], way[0]), max(float(np.hypot(*way)), self._TOUCH)
                    self._angle = bearing - side * np.arcsin(min(1.0, self._TOUCH / radius))
        return abs(angle_between(self._angle, self._marks[self.task_id])) <= self._AIM

    def draw(self, canvas: Canvas) -> None:
        """See `PlanarTask`."""
        for angle, color in zip(self._marks, MARKS.values()):
            canvas.disc(self._pivot + (self._LENGTH + 0.12) * np.array([np.cos(angle), np.sin(angle)]), 0.09, color)
        middle = self._pivot + self._LENGTH / 2 * np.array([np.cos(self._angle), np.sin(self._angle)])
        canvas.box(middle, (self._LENGTH / 2, 0.04), (70, 80, 160), self._angle)
        canvas.disc(self._pivot, 0.08, (70, 80, 160))
        canvas.ring(self.effector, EFFECTOR - 0.02, DARK)

    def state(self) -> dict[str, np.ndarray]:
        """See `PlanarTask`."""
        angles = [self._angle, self._marks[self.task_id]]
        return {"effector": self.effector, "pivot": self._pivot, "angles": np.array(angles)}

    @staticmethod
    def expert(state: Mapping[str, np.ndarray], offset: np.ndarray) -> np.ndarray:
        """To the side of the rod away from the mark, around its tip, then along the circle."""
        effector, pivot, (angle, mark) = state["effector"], state["pivot"], state["angles"]
        turn = angle_between(angle, mark + offset[0])
        if abs(turn) <= 0.03:
            return np.zeros(2)
        side, way = -np.sign(turn), effector - pivot
        bearing, radius = np.arctan2(way[1], way[0]), float(np.hypot(*way))
        behind = angle_between(angle, bearing) * side  # positive: on the side from which to push
        reach = 0.4
        if 0.05 < behind < 1.2 and radius < Lever._LENGTH + 0.02:
            ahead = min(abs(turn), 0.25)
            target = bearing - side * (ahead if behind < 0.4 else behind - 0.3)
            return toward(effector, pivot + reach * np.array([np.cos(target), np.sin(target)]), Lever._STEP)
        if behind > 0.3 or (behind > 0 and radius >= Lever._LENGTH + 0.1):
            target = angle + side * 0.45
            near = abs(angle_between(bearing, target)) < 0.3
            out = reach if near else max(radius, Lever._LENGTH + 0.15)
            step = np.clip(angle_between(bearing, target), -0.4, 0.4)
            return toward(
                effector, pivot + out * np.array([np.cos(bearing + step), np.sin(bearing + step)]), Lever._STEP
            )
        out = Lever._LENGTH + 0.2  # around the tip
        step = side * 0.3 if radius > Lever._LENGTH + 0.12 else 0.0
        return toward(effector, pivot + out * np.array([np.cos(bearing + step), np.sin(bearing + step)]), Lever._STEP)


class Slot(PlanarTask):
    """A block that is held and can be turned, and a wall with two slots; actions are velocity and rate of turn."""

    texts = {color: f"insert the block into the {color} slot" for color in MARKS}
    action_dim, proprio_dim = 3, 4
    _STEP, _TURN, _HALF = 0.08, 0.25, (0.2, 0.06)
    _WALL, _GAP = 0.45, 0.035  # height of the wall, and clearance on each side

    def reset(self, rng: np.random.Generator) -> None:
        """See `PlanarTask`."""
        self.effector = rng.uniform((-0.75, -0.7), (0.75, 0.0))
        self._angle = rng.uniform(-np.pi / 2, np.pi / 2)
        self._slots = rng.permutation([rng.uniform(-0.7, -0.2), rng.uniform(0.2, 0.7)])

    def _corners(self, position: np.ndarray, angle: float) -> np.ndarray:
        c, s = np.cos(angle), np.sin(angle)
        signs = np.array([(-1, -1), (-1, 1), (1, -1), (1, 1)]) * self._HALF
        return position + signs @ np.array([[c, s], [-s, c]])

    def _is_free(self, position: np.ndarray, angle: float) -> bool:
        """No corner is in the wall: above its height, beyond a slot."""
        corners = self._corners(position, angle)
        above = corners[corners[:, 1] > self._WALL]
        inside = [(abs(above[:, 0] - x) <= self._HALF[1] + self._GAP).all() for x in self._slots]
        return (not len(above) or any(inside)) and abs(corners).max() <= 1

    def advance(self, action: np.ndarray) -> bool:
        """See `PlanarTask`."""
        moves = ((self._STEP * action[0], 0, 0), (0, self._STEP * action[1], 0), (0, 0, self._TURN * action[2]))
        for dx, dy, turn in moves:
            position, angle = self.effector + (dx, dy), self._angle + turn
            if self._is_free(position, angle):
                self.effector, self._angle = position, angle
        above = self.effector[1] >= self._WALL + 0.1
        return above and abs(self.effector[0] - self._slots[self.task_id]) <= self._GAP + 0.01

    def draw(self, canvas: Canvas) -> None:
        """See `PlanarTask`."""
        canvas.box((0, self._WALL + 0.5), (1.0, 0.5), (120, 110, 100))
        for x, color in zip(self._slots, MARKS.values()):
            canvas.box((x, self._WALL + 0.5), (self._HALF[1] + self._GAP, 0.5), color)
        canvas.box(self.effector, self._HALF, (240, 130, 30), self._angle)
        canvas.disc(self.effector, 0.04, DARK)

    def state(self) -> dict[str, np.ndarray]:
        """See `PlanarTask`."""
        return {"effector": self.effector, "angle": np.array(self._angle), "slot": self._slots[self.task_id]}

    @staticmethod
    def expert(state: Mapping[str, np.ndarray], offset: np.ndarray) -> np.ndarray:
        """Below the slot and upright, then up."""
        effector, slot = state["effector"], float(state["slot"]) + offset[0]
        upright = np.pi / 2 * np.sign(float(state["angle"]) or 1.0)
        turn = (upright - float(state["angle"])) / Slot._TURN
        aligned = abs(effector[0] - slot) <= 0.02 and abs(turn) <= 0.1
        waiting = Slot._WALL - 0.28
        goal = np.array([slot, Slot._WALL + 0.2 if aligned or effector[1] > waiting + 0.1 else waiting])
        return np.array([*toward(effector, goal, Slot._STEP), np.clip(turn, -1, 1)])

    def proprio(self) -> np.ndarray:
        """Position, and cosine and sine of the double angle."""
        return np.array([*self.effector, np.cos(2 * self._angle), np.sin(2 * self._angle)])


class SortTwo(PlanarTask):
    """Two blocks and two pads: each block belongs on the pad with its frame; the instruction names the first."""

    texts = {color: f"sort both blocks, the {color} one first" for color in OBJECTS}
    action_dim, proprio_dim = 3, 3
    _STEP, _GRASP, _PLACED = 0.12, 0.08, 0.1

    def reset(self, rng: np.random.Generator) -> None:
        """See `PlanarTask`."""
        self.effector, *rest = apart(rng, 5, 0.42)
        self._blocks, self._pads = np.array(rest[:2]), np.array(rest[2:])
        self._closed, self._carried, self._order = False, -1, []

    def advance(self, action: np.ndarray) -> bool:
        """See `PlanarTask`."""
        self.effector = np.clip(self.effector + self._STEP * action[:2], -1, 1)
        closes = bool(action[2] > 0)
        if closes and not self._closed:
            near = np.linalg.norm(self._blocks - self.effector, axis=1)
            self._carried = int(near.argmin()) if near.min() <= self._GRASP else -1
        elif not closes:
            self._carried = -1
        self._closed = closes
        if self._carried >= 0:
            self._blocks[self._carried] = self.effector
        placed = self._placed()
        self._order = [index for index in self._order if placed[index]]
        self._order += [index for index in range(2) if placed[index] and index not in self._order]
        return self._order == [self.task_id, 1 - self.task_id]

    def _placed(self) -> list[bool]:
        near = np.linalg.norm(self._blocks - self._pads, axis=1) <= self._PLACED
        return [bool(near[index]) and self._carried != index for index in range(2)]

    def draw(self, canvas: Canvas) -> None:
        """See `PlanarTask`."""
        for center, color in zip(self._pads, OBJECTS.values()):
            canvas.disc(center, 0.17, (250, 250, 250))
            canvas.ring(center, 0.17, color)
        for center, color in zip(self._blocks, OBJECTS.values()):
            canvas.box(center, (0.1, 0.1), color)
        canvas.ring(self.effector, EFFECTOR, RED if self._closed else DARK)

    def state(self) -> dict[str, np.ndarray]:
        """See `PlanarTask`."""
        first = 0 if self._placed()[self.task_id] else 1
        now = self.task_id if first else 1 - self.task_id
        done = self._order == [self.task_id, 1 - self.task_id]
        place = {"block": self._blocks[now], "pad": self._pads[now]}
        return {"effector": self.effector, **place, "carrying": self._carried == now, "done": done}

    @staticmethod
    def expert(state: Mapping[str, np.ndarray], offset: np.ndarray) -> np.ndarray:
        """To the block, close, to its pad, open; then the other one."""
        effector, carrying = state["effector"], bool(state["carrying"])
        if bool(state["done"]):
            return np.array([0.0, 0.0, -1.0])
        goal = state["pad"] + offset if carrying else state["block"]
        there = np.linalg.norm(goal - effector) <= 0.05
        return np.array([*toward(effector, goal, SortTwo._STEP), 1.0 if there != carrying else -1.0])

    def proprio(self) -> np.ndarray:
        """Position and gripper."""
        return np.array([*self.effector, self._closed])


register_planar_suite("lever", Lever)
register_planar_suite("slot", Slot)
register_planar_suite("sort_two", SortTwo)

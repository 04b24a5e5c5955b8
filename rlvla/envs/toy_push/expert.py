"""Scripted expert for `toy_push`: around the disc to the far side of the zone, then push, around the other disc."""

from __future__ import annotations

from cmath import phase, rect
from math import asin

import numpy as np

from rlvla.envs.experts.base import TableExpert
from rlvla.envs.toy_push.physics import CONTACT, OBJECT_RADIUS, STEP_SIZE

_OBJECT_CLEARANCE = 2 * OBJECT_RADIUS + 0.04  # of the pushed disc from the other
_PUSHER_CLEARANCE = CONTACT + 0.03  # of the pusher on its way
_APPROACH_GAP = 0.04  # it gets behind the disc without touching it
_PUSHING_GAP = 0.12  # largest gap at which it pushes
_PUSHING_ANGLE = 0.6  # largest angle from straight behind at which it pushes, in radians
_SHOVING_GAP = 0.18  # gap below which it goes around the disc even if it shoves the other one
_STEERING = 2.0  # sideways motion per unit of distance from straight behind


class ToyPushExpert(TableExpert):
    """Gets behind the disc and pushes it to the center of the zone (plus the episode's offset), correcting its angle.

    See `TableExpert`.
    """

    suite = "toy_push"

    def _velocity(self, state: dict[str, np.ndarray]) -> np.ndarray:
        pusher, disc, other, zone = (complex(*state[name]) for name in ("pusher", "object", "distractor", "zone"))
        way = displacement(pusher, disc, other, zone + complex(*self._offset.tolist())) / STEP_SIZE
        way /= max(1.0, abs(way.real), abs(way.imag))  # keep the direction
        return np.array([way.real, way.imag])


def displacement(pusher: complex, disc: complex, other: complex, goal: complex) -> complex:
    """Target displacement of the pusher; points of the table are complex numbers."""
    ahead = _direction(disc, goal, [(other, _OBJECT_CLEARANCE)])
    # In the frame of the disc whose first axis is the way ahead.
    position = (pusher - disc) / ahead
    gap = abs(position) - CONTACT
    if gap <= _PUSHING_GAP and abs(phase(-position)) <= _PUSHING_ANGLE:
        return ahead * complex(min(STEP_SIZE, gap + abs(goal - disc)), -_STEERING * position.imag)
    start = disc - (CONTACT + _APPROACH_GAP) * ahead
    obstacles = [(disc, _PUSHER_CLEARANCE), (other, _PUSHER_CLEARANCE)]
    way = _direction(pusher, start, obstacles[: 1 if gap <= _SHOVING_GAP else 2])
    return way * abs(start - pusher)


def _direction(start: complex, goal: complex, obstacles: list[tuple[complex, float]]) -> complex:
    """Unit vector from `start` that leads to `goal`, or past the obstacles (center, clearance) in between."""
    straight = goal - start
    blocked = []  # direction and angular radius of each obstacle that is nearer than the goal
    for center, clearance in obstacles:
        way, clearance = center - start, min(clearance, abs(goal - center))
        if abs(way) - clearance < abs(straight):
            blocked.append((way, asin(min(1.0, clearance / abs(way))) + 4 * max(0.0, clearance - abs(way))))
    candidates = [straight, *(way * rect(1.0, side * angle) for way, angle in blocked for side in (-1, 1))]
    free = [c for c in candidates if all(abs(phase(c / way)) > angle - 1e-6 for way, angle in blocked)]
    best = min(free or candidates[:1], key=lambda candidate: abs(phase(candidate / straight)))
    return best / abs(best)

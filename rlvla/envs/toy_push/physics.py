"""Quasi-static contact of discs on a table with walls, for one scene and for many at once.

The pusher goes where it is commanded, an object in its way moves along the contact normal, objects push each other
apart, and walls stop everything. There is no friction, no inertia and nothing random. `push` is written for numbers and
for arrays alike: the same operations in the same order give equal results to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

OBJECT_RADIUS = 0.16
PUSHER_RADIUS = 0.12
CONTACT = OBJECT_RADIUS + PUSHER_RADIUS  # distance of the centers at contact
STEP_SIZE = 0.08
# Overlaps up to this remain where contacts work against each other.
TOLERANCE = 1e-3

_OBJECT_LIMIT, _PUSHER_LIMIT = 1.0 - OBJECT_RADIUS, 1.0 - PUSHER_RADIUS
_SUBSTEPS = 2
_ROUNDS = 12  # of separating all pairs; each halves the overlap of a pushed pair of objects
_SLOP = 1e-9  # separated discs are this far apart, so that rounding does not make them touch again

# Coordinates of pusher, first and second object: (px, py, ax, ay, bx, by), numbers or arrays [n].
Positions = tuple[Any, Any, Any, Any, Any, Any]


@dataclass(frozen=True)
class Arithmetic:
    """Operations that differ between numbers and arrays."""

    sqrt: Callable[[Any], Any]
    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    any: Callable[[Any], Any]
    where: Callable[[Any, Any, Any], Any]


NUMBERS = Arithmetic(math.sqrt, min, max, bool, lambda condition, yes, no: yes if condition else no)
ARRAYS = Arithmetic(np.sqrt, np.minimum, np.maximum, np.any, np.where)


def push(positions: Positions, dx: Any, dy: Any, do: Arithmetic) -> Positions:
    """Move the pusher by (`dx`, `dy`) and all else out of its way.

    A substep after which discs would overlap by more than `TOLERANCE`, because they are jammed, is skipped.

    Args:
        positions: positions without overlaps, numbers or float64 arrays [n].
        dx: displacement to the right, of the same type.
        dy: displacement upwards.
        do: `NUMBERS` or `ARRAYS`.
    """
    for _ in range(_SUBSTEPS):
        px, py, ax, ay, bx, by = positions
        px, py = _inside(px + dx / _SUBSTEPS, _PUSHER_LIMIT, do), _inside(py + dy / _SUBSTEPS, _PUSHER_LIMIT, do)
        for _ in range(_ROUNDS):
            if not do.any(_overlap((px, py, ax, ay, bx, by), do) > 0):
                break
            ux, uy = _way_out(ax - px, ay - py, CONTACT, do)
            ax, ay = ax + ux, ay + uy
            ux, uy = _way_out(bx - px, by - py, CONTACT, do)
            bx, by = bx + ux, by + uy
            ux, uy = _way_out(bx - ax, by - ay, 2 * OBJECT_RADIUS, do)
            ax, ay = _inside(ax - ux / 2, _OBJECT_LIMIT, do), _inside(ay - uy / 2, _OBJECT_LIMIT, do)
            bx, by = _inside(bx + ux / 2, _OBJECT_LIMIT, do), _inside(by + uy / 2, _OBJECT_LIMIT, do)
        # Objects that a wall holds stop the pusher.
        for x, y in ((ax, ay), (bx, by)):
            ux, uy = _way_out(px - x, py - y, CONTACT, do)
            px, py = _inside(px + ux, _PUSHER_LIMIT, do), _inside(py + uy, _PUSHER_LIMIT, do)
        moved = (px, py, ax, ay, bx, by)
        jammed = _overlap(moved, do) > TOLERANCE
        positions = tuple(do.where(jammed, old, new) for old, new in zip(positions, moved))  # type: ignore[assignment]
    return positions


def _inside(x: Any, limit: float, do: Arithmetic) -> Any:
    return do.minimum(do.maximum(x, -limit), limit)


def _way_out(dx: Any, dy: Any, reach: float, do: Arithmetic) -> tuple[Any, Any]:
    """Displacement that moves a disc at (dx, dy) from another to distance `reach`; 0 if it is farther away."""
    distance = do.sqrt(dx * dx + dy * dy)
    share = (distance < reach) * ((reach + _SLOP - distance) / distance)
    return share * dx, share * dy


def _overlap(positions: Positions, do: Arithmetic) -> Any:
    """Maximum overlap of two discs, negative if none overlap."""
    px, py, ax, ay, bx, by = positions
    first = CONTACT - do.sqrt((ax - px) * (ax - px) + (ay - py) * (ay - py))
    second = CONTACT - do.sqrt((bx - px) * (bx - px) + (by - py) * (by - py))
    between = 2 * OBJECT_RADIUS - do.sqrt((bx - ax) * (bx - ax) + (by - ay) * (by - ay))
    return do.maximum(do.maximum(first, second), between)

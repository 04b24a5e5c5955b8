"""Grasps from above for a parallel gripper, and places to put an object down, from points on collision surfaces.

Points are [N, 3] in meters, z up. The hand points down, or is tilted beside obstacles; `yaw` is the direction of its
closing axis. Dimensions: Franka Panda gripper.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from rlvla.envs.robosuite.rotation import HOME_YAW

# Open hand, in meters from the grip site between the fingers: below it the fingertips, above it the hand's body.
TIP, HAND_ABOVE = 0.012, 0.045
HALF_OPENING, FINGER_THICKNESS, FINGER_HALF_WIDTH = 0.038, 0.022, 0.011
HAND_HALF_LENGTH, HAND_HALF_WIDTH = 0.105, 0.035
DEPTH = 0.024  # of the grip site below the top of the object between the fingers
# A pinch with the fingertips: the grip site is above the object. At that cost it is chosen for flat ones alone.
PINCH_DEPTH, PINCH_COST = -0.003, 0.5
MAX_RELIABLE_COST = 1.0  # above it a grasp is likely to slip, or the hand to touch something
TILT, TILT_COST = 0.45, 0.3  # radians; for objects under an overhang, where a vertical hand collides
CELL = 0.008  # of the search, and of height maps
YAWS = 16  # in half a turn
# The wrist lies above the grip site, and closer to the robot; its distance from the shoulder is at most `REACH`.
SHOULDER, WRIST_ABOVE, WRIST_BEHIND, REACH = 0.333, 0.204, 0.088, 0.67
MOST_TILT = 0.5  # radians
REACH_MARGIN = 0.04  # meters kept in reserve by `reaching_tilt`: a stretched arm overshoots
_MARGINS = ((0.003, 5.0), (0.008, 0.5))  # clearance, cost of violating it
_KEPT = 400  # candidates per object
_MOST_CACHED = 200  # objects


@dataclass(frozen=True)
class Grasp:
    """A grasp from above.

    Attributes:
        position: grip site [3].
        yaw: direction along which the fingers open, within a quarter turn of the home pose.
        width: of the object between the fingers.
        cost: lower is better; see `MAX_RELIABLE_COST`.
        tilt: of a hand whose fingers point down and away from the robot, radians.
        slips: the object is likely to slip if it is lifted.
    """

    position: np.ndarray
    yaw: float
    width: float
    cost: float
    tilt: float = 0.0
    slips: bool = False


@dataclass(frozen=True)
class Candidates:
    """Grasps of an object by itself, in a frame at its origin turned with it about the vertical axis.

    Attributes:
        position: [K, 3], sorted by cost.
        yaw: [K].
        width: [K].
        cost: [K].
    """

    position: np.ndarray
    yaw: np.ndarray
    width: np.ndarray
    cost: np.ndarray


_cache: OrderedDict[bytes, Candidates] = OrderedDict()


def candidates_of(points: np.ndarray, com: np.ndarray) -> Candidates:
    """Grasps of an object that nothing surrounds; cached.

    Args:
        points: surface [N, 3] of the object.
        com: center of mass [2] in the plane.
    """
    key = np.round(np.concatenate([points.ravel(), com]), 3).tobytes()
    if key not in _cache:
        _cache[key] = _search(points, com)
        if len(_cache) > _MOST_CACHED:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    return _cache[key]


def _search(points: np.ndarray, com: np.ndarray) -> Candidates:
    yaws = np.arange(YAWS) * math.pi / YAWS
    candidates = [_search_yaw(points, com, yaw, DEPTH, 0.0) for yaw in yaws]
    candidates += [_search_yaw(points, com, yaw, PINCH_DEPTH, PINCH_COST) for yaw in yaws]
    position, yaw, width, cost = (np.concatenate(column) for column in zip(*candidates))
    order = np.argsort(cost, kind="stable")[:_KEPT]
    return Candidates(position[order], yaw[order], width[order], cost[order])


def _search_yaw(
    points: np.ndarray, com: np.ndarray, yaw: float, depth: float, base_cost: float
) -> tuple[np.ndarray, ...]:
    """Position [K, 3], yaw, width and cost [K] of the grasps with one yaw and depth."""
    across, along = _axes(yaw)
    u, v, z = points[:, :2] @ across, points[:, :2] @ along, points[:, 2]
    com_u, com_v = com @ across, com @ along
    bottom = z.min()
    grid_u, grid_v = (np.arange(p.min(), p.max() + 0.5 * CELL, CELL) for p in (u, v))
    cv, cu = (c.ravel() for c in np.meshgrid(grid_v, grid_u, indexing="ij"))
    between = (np.abs(v - cv[:, None]) < FINGER_HALF_WIDTH) & (np.abs(u - cu[:, None]) < HALF_OPENING + 0.004)
    rows = between.any(axis=1)
    between, cv = between[rows], cv[rows]
    top = np.where(between, z, -np.inf).max(axis=1)
    height = np.maximum(top - depth, bottom + TIP + 0.004)
    gripped = between & (z > height[:, None] - 0.008)
    low, high = np.where(gripped, u, np.inf).min(axis=1), np.where(gripped, u, -np.inf).max(axis=1)
    gripped_any = gripped.any(axis=1)
    low, high = np.where(gripped_any, low, 0.0), np.where(gripped_any, high, 1.0)
    width, cu = high - low, 0.5 * (low + high)
    rows = (height <= top + 0.004) & (gripped.sum(axis=1) >= 4) & (width < 2 * HALF_OPENING - 0.006)
    # Different centers of the search may meet the same surface.
    keys = np.round(np.stack([cv, cu, height], axis=1)[rows], 3)
    first = np.flatnonzero(rows)[np.unique(keys, axis=0, return_index=True)[1]]
    cv, cu, height, width, gripped = cv[first], cu[first], height[first], width[first], gripped[first]
    cost = base_cost + 0.25 * np.hypot(cu - com_u, cv - com_v) / 0.03 + 0.3 * np.maximum(0.0, width - 0.06) / 0.01
    left, right = gripped & (v < cv[:, None] - 0.002), gripped & (v > cv[:, None] + 0.002)
    uneven = np.zeros(len(cu))
    for extreme, none in ((np.min, np.inf), (np.max, -np.inf)):
        a, b = (extreme(np.where(side, u, none), axis=1) for side in (left, right))
        both = np.isfinite(a) & np.isfinite(b)
        uneven[both] += np.abs(a[both] - b[both])
    one_sided = (left.sum(axis=1) < 2) | (right.sum(axis=1) < 2)
    cost += np.where(one_sided, 0.5, 0.6 * np.maximum(0.0, uneven - 0.003) / 0.01)
    cost += _collision_cost(u, v, z, cu, cv, height)
    position = np.concatenate([cu[:, None] * across + cv[:, None] * along, height[:, None]], axis=1)
    return position, np.full(len(cu), yaw), width, cost


def _axes(yaw: float) -> tuple[np.ndarray, np.ndarray]:
    """Direction in which the fingers open, and the horizontal one perpendicular to it."""
    return np.array([math.cos(yaw), math.sin(yaw)]), np.array([-math.sin(yaw), math.cos(yaw)])


def _collision_cost(
    u: np.ndarray, v: np.ndarray, z: np.ndarray, cu: np.ndarray, cv: np.ndarray, height: np.ndarray
) -> np.ndarray:
    """Cost [K] of points in the way of the open hand; points u, v, z are [N] or [K, N], centers and heights [K]."""
    du, dv, dz = np.abs(u - cu[:, None]), np.abs(v - cv[:, None]), z - height[:, None]
    cost = np.zeros(len(cu))
    for margin, weight in _MARGINS:
        fingers = (du > HALF_OPENING - 0.3 * margin) & (du < HALF_OPENING + FINGER_THICKNESS + margin)
        fingers &= (dv < FINGER_HALF_WIDTH + margin) & (dz > -TIP - 0.3 * margin)
        hand = (du < HAND_HALF_LENGTH + margin) & (dv < HAND_HALF_WIDTH + margin) & (dz > HAND_ABOVE)
        for inside in (fingers, hand):
            cost += weight * np.minimum(1.0, inside.sum(axis=1) / 6)
    return cost


def overreach(places: np.ndarray, base: np.ndarray, tilt: float = 0.0) -> np.ndarray:
    """Meters [...] by which grip sites [..., 3] are out of reach; negative within.

    Args:
        places: positions of a hand that points down.
        base: position [3] of the robot's base.
        tilt: of the fingers away from the robot, radians, which brings the wrist closer to it.
    """
    way = places - base
    c, s = math.cos(tilt), math.sin(tilt)
    radius = np.hypot(way[..., 0], way[..., 1]) - WRIST_BEHIND * c - WRIST_ABOVE * s
    height = way[..., 2] + WRIST_ABOVE * c - WRIST_BEHIND * s - SHOULDER
    return np.hypot(radius, height) - REACH


def reaching_tilt(place: np.ndarray, base: np.ndarray) -> float:
    """The smallest tilt in radians with which the hand reaches a position [3] with `REACH_MARGIN`, or `MOST_TILT`."""
    low, high = 0.0, MOST_TILT
    if overreach(place, base) <= -REACH_MARGIN:
        return 0.0
    for _ in range(6):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if overreach(place, base, middle) <= -REACH_MARGIN else (middle, high)
    return high


def plan_grasp(
    candidates: Candidates,
    position: np.ndarray,
    yaw: float,
    others: np.ndarray,
    base: np.ndarray,
    avoid: list[Grasp] | tuple[()] = (),
) -> Grasp | None:
    """The best grasp of an object among others; None if there is no candidate.

    Args:
        candidates: of `candidates_of`.
        position: the object's origin [3].
        yaw: turn of its frame.
        others: points [M, 3] on everything else.
        base: position [3] of the robot's base.
        avoid: grasps that failed.
    """
    if not len(candidates.cost):
        return None
    c, s = math.cos(yaw), math.sin(yaw)
    places = candidates.position @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1.0]]) + position
    turns = wrapped_array(candidates.yaw + yaw - HOME_YAW)
    # The last term only breaks ties: all states get the same of several equal grasps.
    cost = candidates.cost + 0.5 * np.abs(turns) / (math.pi / 2) + 0.02 * (places[:, 1] - position[1]) / 0.03
    cost += 0.5 * np.maximum(0.0, overreach(places, base)) / 0.05
    for other in avoid:
        near = np.linalg.norm(places - other.position, axis=1) < 0.015
        cost += 2.0 * (near & (np.abs(wrapped_array(turns + HOME_YAW - other.yaw)) < 0.3))
    near = others[(np.abs(others[:, :2] - position[:2]) < 0.25).all(axis=1)]
    order = np.argsort(cost, kind="stable")
    best, choice, tilted = np.inf, 0, 0.0
    for tilt, more in ((0.0, 0.0), (TILT, TILT_COST)):
        if best < MAX_RELIABLE_COST:
            break
        for start in range(0, len(order), 32):
            block = order[start : start + 32]
            if cost[block[0]] + more >= best:
                break
            u, v, z = _in_hand(near, places[block], turns[block] + HOME_YAW, base, tilt)
            none = np.zeros(len(block))
            total = cost[block] + more + _collision_cost(u, v, z, none, none, none)
            if total.min() < best:
                best, choice, tilted = float(total.min()), int(block[total.argmin()]), tilt
    slips = bool(candidates.cost[choice] > MAX_RELIABLE_COST)
    yaw = float(turns[choice]) + HOME_YAW
    return Grasp(places[choice], yaw, float(candidates.width[choice]), best, tilted, slips)


def _in_hand(
    points: np.ndarray, places: np.ndarray, yaw: np.ndarray, base: np.ndarray, tilt: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points [N, 3] in the frames of hands at places [K, 3] with yaw [K]: across, along and above, [K, N] each."""
    x, y, z = (points[:, axis] - places[:, axis, None] for axis in range(3))
    cos, sin = np.cos(yaw)[:, None], np.sin(yaw)[:, None]
    u, v = x * cos + y * sin, y * cos - x * sin
    if not tilt:
        return u, v, z
    way = (places - base)[:, :2] / np.linalg.norm((places - base)[:, :2], axis=1, keepdims=True)
    angle = tilt * (way[:, 1:] * cos - way[:, :1] * sin)
    return u, v * np.cos(angle) + z * np.sin(angle), z * np.cos(angle) - v * np.sin(angle)


def wrapped_array(angles: np.ndarray) -> np.ndarray:
    """Angles modulo pi, in [-pi / 2, pi / 2)."""
    return (angles + math.pi / 2) % math.pi - math.pi / 2


@dataclass(frozen=True)
class Placement:
    """Where the hand releases an object.

    Attributes:
        origin: position [2] of the object's origin.
        height: of the grip site; the object touches its support.
        turn: of the hand about the vertical axis, from its present yaw.
    """

    origin: np.ndarray
    height: float
    turn: float


class HeightMap:
    """Greatest height of points over cells of the plane.

    Args:
        points: [N, 3].
        floor: height where there are no points.
    """

    def __init__(self, points: np.ndarray, floor: float):
        self.floor = floor
        self._origin = points[:, :2].min(axis=0) - CELL if len(points) else np.zeros(2)
        cells = self._cells(points[:, :2])
        self._map = np.full(cells.max(axis=0) + 2 if len(points) else (1, 1), floor)
        np.maximum.at(self._map, tuple(cells.T), points[:, 2])

    def _cells(self, xy: np.ndarray) -> np.ndarray:
        return np.floor((xy - self._origin) / CELL).astype(np.int64)

    def at(self, xy: np.ndarray) -> np.ndarray:
        """Heights [...] at positions [..., 2]."""
        cells = self._cells(xy)
        inside = ((cells >= 0) & (cells < self._map.shape)).all(axis=-1)
        return np.where(inside, self._map[tuple(np.where(inside[..., None], cells, 0).T)].T, self.floor)

    def highest_on_way(self, start: np.ndarray, end: np.ndarray, radius: float) -> float:
        """Greatest height within a radius of the segment between two positions [2]."""
        steps = max(2, int(np.linalg.norm(end - start) / CELL) + 1)
        ticks = np.arange(-radius, radius + 0.5 * CELL, CELL)
        window = np.stack(np.meshgrid(ticks, ticks), axis=-1).reshape(-1, 2)
        window = window[np.hypot(*window.T) <= radius]
        way = start + np.linspace(0, 1, steps)[::2, None] * (end - start)
        return float(self.at(way[:, None] + window).max())


def plan_placement(
    held: np.ndarray, origin: np.ndarray, yaw: float, *, spots: np.ndarray, turns: np.ndarray, heights: HeightMap
) -> Placement:
    """The spot at which a held object comes to lie lowest, close to the first one and with little turning.

    Args:
        held: points [N, 3] on the object, relative to the grip site.
        origin: of the object [2], relative to the grip site.
        yaw: of the hand.
        spots: positions [K, 2] for the object's origin; the first is preferred.
        turns: of the hand [T], radians.
        heights: of everything else.
    """
    fingers = _footprint(HALF_OPENING + FINGER_THICKNESS, FINGER_HALF_WIDTH)
    hand = _footprint(HAND_HALF_LENGTH, HAND_HALF_WIDTH)
    lowest = _lowest_points(held)
    best, choice = np.inf, None
    for turn in turns:
        grips = spots - origin @ _rotation(turn).T
        levels = np.full(len(spots), heights.floor)
        for shape, angle, below in (
            (lowest, turn, lowest[:, 2]),
            (fingers, yaw + turn, -TIP),
            (hand, yaw + turn, HAND_ABOVE),
        ):
            ground = heights.at(grips[:, None] + shape[:, :2] @ _rotation(angle).T)
            levels = np.maximum(levels, (ground - below).max(axis=1))
        cost = 10.0 * levels + 4.0 * np.linalg.norm(spots - spots[0], axis=1) + 0.3 * abs(turn) / (math.pi / 2)
        if cost.min() < best:
            best, index = float(cost.min()), int(cost.argmin())
            choice = Placement(spots[index], float(levels[index]), float(turn))
    assert choice is not None
    return choice


def _rotation(angle: float) -> np.ndarray:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, -s], [s, c]])


def _footprint(half_length: float, half_width: float) -> np.ndarray:
    """Positions [M, 2] that cover a rectangle along the axis of the fingers."""
    axes = [np.linspace(-half, half, int(2 * half / CELL) + 2) for half in (half_length, half_width)]
    return np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)


def _lowest_points(points: np.ndarray) -> np.ndarray:
    """The lowest point of each cell of the plane."""
    order = np.argsort(points[:, 2], kind="stable")
    cells = np.floor(points[order, :2] / CELL).astype(np.int64)
    return points[order][np.unique(cells, axis=0, return_index=True)[1]]

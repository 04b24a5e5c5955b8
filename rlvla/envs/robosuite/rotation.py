"""Rotations of the hand about the vertical axis. Angles are in radians."""

from __future__ import annotations

import math

import numpy as np

# Yaw of the hand in its home pose, where the fingers open along the world's y axis: they open along the hand's x axis.
HOME_YAW = math.pi / 2
# Maximum turn of the hand from home; with symmetric fingers, it covers all directions.
MOST_TURN = math.pi / 2


def yaw_of(quat: np.ndarray) -> float:
    """Rotation of a quaternion [4] (w first) about the vertical axis."""
    w, x, y, z = quat
    return math.atan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))


def wrapped(angle: float, period: float) -> float:
    """The angle modulo `period`, in [-period / 2, period / 2)."""
    return (angle + period / 2) % period - period / 2


def quarter_turn(angle: float) -> float:
    """Angle modulo pi/2, in [-pi/4, pi/4): a cube is symmetric under quarter turns."""
    return wrapped(angle, math.pi / 2)


def grasp_yaw(finger_yaw: float, folds: int) -> list[float]:
    """Encode the grasp direction of a symmetric object as policy input.

    Args:
        finger_yaw: yaw of a direction along which the fingers can close on the object.
        folds: number of such directions in a full turn: 4 for a cube, 2 for a bar.

    Returns:
        Sine and cosine of `folds` times the turn from home, and the smallest such turn as the yaw parameter of a
        primitive: 1 is `MOST_TURN`.
    """
    turn = finger_yaw - HOME_YAW
    smallest = wrapped(turn, 2.0 * math.pi / folds)
    return [math.sin(folds * turn), math.cos(folds * turn), smallest / MOST_TURN]


def pointing_down(yaw: float) -> np.ndarray:
    """Rotation matrix [3, 3] of a hand that points straight down."""
    c, s = math.cos(yaw), math.sin(yaw)
    return np.array([[c, s, 0.0], [s, -c, 0.0], [0.0, 0.0, -1.0]])


def rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Axis times angle [3] of a rotation matrix [3, 3] by less than half a turn."""
    axis = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    sine, cosine = 0.5 * math.sqrt(float(axis @ axis)), 0.5 * (float(np.trace(rotation)) - 1.0)
    return axis * (0.5 if sine < 1e-9 else 0.5 * math.atan2(sine, cosine) / sine)

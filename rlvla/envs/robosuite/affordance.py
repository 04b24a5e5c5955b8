"""How well an action primitive suits the objects around it, as in MAPLE (see `rlvla.envs.robosuite.primitives`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Name of the component in `ChunkResult.components`.
AFFORDANCE = "affordance"
# Distance in meters from a keypoint within which a primitive suits it: a radius, or a bound per axis.
_THRESHOLDS: dict[str, float | tuple[float, float, float]] = {
    "reach": 0.06,
    "grasp": 0.03,
    "push": (0.12, 0.12, 0.04),
}
_STEEPNESS = 10.0  # per meter


def affordance(name: str, target: np.ndarray | None, keypoints: Sequence[np.ndarray]) -> float:
    """1 within the primitive's threshold of a keypoint, else 1 - tanh(10 (distance - threshold)), the best of all.

    Args:
        name: the primitive.
        target: [3] where it goes first; None if it goes nowhere.
        keypoints: positions [3] of what it may be used on; none if it needs no object, which gives 1.
    """
    if target is None or not len(keypoints):
        return 1.0
    nearest = min(_beyond(np.abs(target - keypoint), _THRESHOLDS[name]) for keypoint in keypoints)
    return 1.0 - float(np.tanh(_STEEPNESS * nearest))


def _beyond(apart: np.ndarray, threshold: float | tuple[float, float, float]) -> float:
    """Distance of a point from the ball or box of points within the threshold; `apart` [3] is not negative."""
    if isinstance(threshold, float):
        return max(float(np.linalg.norm(apart)) - threshold, 0.0)
    return float(np.linalg.norm(np.maximum(apart - np.array(threshold), 0.0)))

"""Normalization of actions and proprioception with `dataset_statistics.json`, and LIBERO's gripper convention."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlvla.utils.errors import ConfigError

# Keeps constant dimensions finite; part of the OFT formula. Plain OpenVLA unnormalizes with 0.
RANGE_EPS = 1e-8
BOUND_KEYS = {"q99": ("q01", "q99"), "bounds": ("min", "max")}


def unnormalize_actions(
    actions: Any, stats: dict[str, Any], *, mode: str = "q99", eps: float = RANGE_EPS
) -> np.ndarray:
    """Map actions in [-1, 1] to the units of the environment: 0.5 (a + 1)(hi - lo + eps) + lo where the mask is True.

    Args:
        actions: [..., D].
        stats: statistics of the actions, or of a dataset (then its "action" entry is used).
        mode: "q99" uses the range q01 to q99 (LIBERO, BRIDGE), "bounds" min to max (ALOHA, RoboTwin).
        eps: added to the range; 0 for plain OpenVLA.

    Returns:
        [..., D] float64; dimensions whose mask is False are unchanged.

    Raises:
        ConfigError: unknown mode, missing statistics or wrong number of dimensions.
    """
    actions = np.asarray(actions, dtype=np.float64)
    low, high, mask = _bounds(stats, "action", mode, actions.shape[-1])
    return np.where(mask, 0.5 * (actions + 1.0) * (high - low + eps) + low, actions)


def normalize_actions(actions: Any, stats: dict[str, Any], *, mode: str = "q99") -> np.ndarray:
    """Map environment actions to [-1, 1], as training labels; the inverse of `unnormalize_actions`.

    Values outside the range are clipped, constant dimensions become 0, dimensions whose mask is False are unchanged.
    Arguments and errors as in `unnormalize_actions`.
    """
    actions = np.asarray(actions, dtype=np.float64)
    low, high, mask = _bounds(stats, "action", mode, actions.shape[-1])
    scaled = np.clip(2.0 * (actions - low) / (high - low + RANGE_EPS) - 1.0, -1.0, 1.0)
    return np.where(mask, np.where(high == low, 0.0, scaled), actions)


def normalize_proprio(proprio: Any, stats: dict[str, Any], *, mode: str = "q99") -> np.ndarray:
    """Map proprioception [..., P] to [-1, 1] (float32): 2 (x - lo)/(hi - lo + 1e-8) - 1, clipped.

    Args:
        proprio: [..., P].
        stats: statistics of the proprioception, or of a dataset (then its "proprio" entry is used).
        mode: as in `unnormalize_actions`.

    Raises:
        ConfigError: unknown mode, missing statistics or wrong number of dimensions.
    """
    proprio = np.asarray(proprio, dtype=np.float64)
    low, high, mask = _bounds(stats, "proprio", mode, proprio.shape[-1])
    scaled = np.clip(2.0 * (proprio - low) / (high - low + RANGE_EPS) - 1.0, -1.0, 1.0)
    return np.where(mask, scaled, proprio).astype(np.float32)


def proprio_bounds(stats: dict[str, Any], dims: int, *, mode: str = "q99") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The range that `normalize_proprio` maps to [-1, 1], and which of the `dims` it maps: low, high, mask, each [P].

    Arguments and errors as in `normalize_proprio`.
    """
    return _bounds(stats, "proprio", mode, dims)


def libero_gripper(actions: Any) -> np.ndarray:
    """LIBERO's gripper command in the last dimension: from [0, 1] (1 = open) to -1 (open) and +1 (close).

    A value of exactly 0.5 gives 0. Apply it after `unnormalize_actions`; other dimensions are unchanged.
    """
    actions = np.array(actions, dtype=np.float64)
    actions[..., -1] = -np.sign(2.0 * actions[..., -1] - 1.0)
    return actions


def libero_gripper_target(actions: Any) -> np.ndarray:
    """The inverse of `libero_gripper`, for training labels: the last dimension from [-1, 1] (-1 = open) to [1, 0]."""
    actions = np.array(actions, dtype=np.float64)
    actions[..., -1] = 0.5 * (1.0 - np.clip(actions[..., -1], -1.0, 1.0))
    return actions


def _bounds(stats: dict[str, Any], entry: str, mode: str, dims: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if mode not in BOUND_KEYS:
        raise ConfigError(f"normalisation mode {mode!r} is unknown; use one of {sorted(BOUND_KEYS)}")
    if isinstance(stats.get(entry), dict):
        stats = stats[entry]
    missing = [key for key in BOUND_KEYS[mode] if key not in stats]
    if missing:
        raise ConfigError(f"the {entry} statistics lack {missing} (they have {sorted(stats)}), needed by mode {mode!r}")
    low, high = (np.asarray(stats[key], dtype=np.float64) for key in BOUND_KEYS[mode])
    mask = np.asarray(np.ones(low.shape) if stats.get("mask") is None else stats["mask"], dtype=bool)
    if not low.shape == high.shape == mask.shape == (dims,):
        raise ConfigError(
            f"the {entry} statistics have {low.size} dimensions (mask {mask.size}), but the data have {dims}; "
            "choose the statistics of this robot"
        )
    return low, high, mask

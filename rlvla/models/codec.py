"""Encoding of actions and proprio for a network: normalization by dataset statistics, and action bins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlvla.models.vla.action_tokenizer import ActionTokenizer
from rlvla.models.vla.normalization import (
    RANGE_EPS,
    libero_gripper,
    libero_gripper_target,
    normalize_actions,
    normalize_proprio,
    proprio_bounds,
    unnormalize_actions,
)
from rlvla.utils.errors import ConfigError

# Actions (in [-1, 1]) that differ by less than this over all outputs are the same to any controller.
CONSTANT_ACTION_RANGE = 1e-6


class Codec(Protocol):
    """Normalization of actions and proprio, see `StatisticsCodec`."""

    @property
    def action_mask(self) -> list[bool]: ...  # noqa: D102
    @property
    def effective_numbers(self) -> Tensor: ...  # noqa: D102
    def normalize_proprio(self, proprio: Any) -> np.ndarray: ...  # noqa: D102
    def normalize_actions(self, actions: np.ndarray) -> np.ndarray: ...  # noqa: D102
    def unnormalize_actions(self, actions: np.ndarray) -> np.ndarray: ...  # noqa: D102


class StatisticsCodec:
    """Normalization by dataset statistics, and discretization of actions.

    Args:
        statistics: of one dataset ("action" and, with proprio, "proprio"); None if nothing is encoded.
        chunk: (A, D), actions per decision and dimensions of an action.
        proprio_dim: P, length of the proprio vector; 0: no proprio.
        bins: the action bins; column k of a policy is token id `first_token_id` + k.
        normalization: range that is mapped to [-1, 1]: "q99" (q01 to q99) or "bounds" (min to max).
        range_eps: added to the range of actions, see `unnormalize_actions`.
        gripper_convention: "libero" converts the last dimension, see `libero_gripper`; "none" keeps it.
    """

    def __init__(
        self,
        statistics: Mapping[str, Any] | None,
        *,
        chunk: tuple[int, int],
        proprio_dim: int,
        bins: ActionTokenizer,
        normalization: str,
        range_eps: float = RANGE_EPS,
        gripper_convention: str = "none",
    ):
        self.statistics, self.action_tokenizer = statistics, bins
        self._chunk, self._proprio_dim = chunk, proprio_dim
        self._mode, self._range_eps, self._gripper = normalization, range_eps, gripper_convention

    def normalize_proprio(self, proprio: Any) -> np.ndarray:
        """Normalize the environment's proprioception [..., P] to float32 in [-1, 1]."""
        return normalize_proprio(proprio, self._statistics_of("proprio"), mode=self._mode)

    def normalizes_proprio_like(self, other: StatisticsCodec) -> bool:
        """Whether both normalize proprio identically."""
        mine, theirs = (
            proprio_bounds(codec._statistics_of("proprio"), codec._proprio_dim, mode=codec._mode)
            for codec in (self, other)
        )
        return all(np.array_equal(left, right) for left, right in zip(mine, theirs))

    def normalize_actions(self, actions: np.ndarray) -> np.ndarray:
        """Environment actions [..., A, D] -> normalized ones, float32."""
        return self._normalized(actions).astype(np.float32)

    def _normalized(self, actions: np.ndarray) -> np.ndarray:
        """In float64, so that bin edges are as exact as the statistics allow."""
        actions = np.asarray(actions)
        if self._gripper == "libero":
            actions = libero_gripper_target(actions)
        return normalize_actions(actions, self._statistics_of("action"), mode=self._mode)

    def unnormalize_actions(self, actions: np.ndarray) -> np.ndarray:
        """Normalized actions [..., A, D] -> environment actions, float32; LIBERO's gripper becomes binary."""
        actions = unnormalize_actions(actions, self._statistics_of("action"), mode=self._mode, eps=self._range_eps)
        if self._gripper == "libero":
            actions = libero_gripper(actions)
        return actions.astype(np.float32)

    def encode_actions(self, actions: np.ndarray) -> np.ndarray:
        """Environment actions [..., A, D] -> columns of the action vocabulary [..., A*D] int64, as training labels."""
        bins = self.action_tokenizer
        columns = bins.ids_to_columns(bins.encode(self._normalized(actions)))
        return columns.reshape(*columns.shape[:-2], self._chunk[0] * self._chunk[1])

    def decode_actions(self, columns: np.ndarray) -> np.ndarray:
        """Columns [..., A*D] -> environment actions [..., A, D] float32."""
        ids = np.asarray(self.action_tokenizer.columns_to_ids(columns))
        return self.unnormalize_actions(self.action_tokenizer.decode(ids).reshape(*ids.shape[:-1], *self._chunk))

    @property
    def effective_tokens(self) -> Tensor:
        """[A*D] bool: tokens that can change the action.

        A dimension that is constant in the dataset (its statistics have zero range) decodes to the same value for every
        token, so its policy gradient would be pure noise.
        """
        bins = np.arange(self.action_tokenizer.n_bins)
        return varying(self.decode_actions(bins[:, None].repeat(self._chunk[0] * self._chunk[1], 1)))

    @property
    def effective_numbers(self) -> Tensor:
        """[A*D] bool: like `effective_tokens`, for the numbers in a continuous chunk."""
        return varying(self.unnormalize_actions(np.linspace(-1.0, 1.0, 5)[:, None, None] + np.zeros(self._chunk)))

    @property
    def action_mask(self) -> list[bool]:
        """[D]: whether an action dimension is normalized by the dataset statistics."""
        mask = self._statistics_of("action").get("mask")
        return [bool(kept) for kept in ([True] * self._chunk[1] if mask is None else mask)]

    def _statistics_of(self, entry: str) -> dict[str, Any]:
        if not self.statistics or entry not in self.statistics:
            raise ConfigError(f"the checkpoint's statistics have no {entry!r} entry; recompute dataset_statistics.json")
        return self.statistics[entry]


def varying(actions: np.ndarray) -> Tensor:
    """[A*D] bool: numbers that vary across environment actions [n, A, D]."""
    return torch.from_numpy(np.ptp(actions.reshape(len(actions), -1), axis=0) > CONSTANT_ACTION_RANGE)

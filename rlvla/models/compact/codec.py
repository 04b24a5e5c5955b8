"""Between the numbers of the environment and those of the network: normalization and action bins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvla.models.compact.config import CompactConfig
from rlvla.models.vla.action_tokenizer import ActionTokenizer
from rlvla.models.vla.normalization import RANGE_EPS, normalize_actions, normalize_proprio, unnormalize_actions

_CONSTANT = 1e-6  # actions in [-1, 1] that differ by less over all outputs are the same to any controller


class CompactCodec:
    """Encodes and decodes actions, and normalizes proprio.

    Args:
        config: sizes and conventions.
        statistics: of one dataset, "action" and, with proprio, "proprio".
    """

    def __init__(self, config: CompactConfig, statistics: dict[str, Any]):
        self.config, self.statistics = config, statistics
        self._bins = ActionTokenizer(config.n_action_bins, config.n_action_bins)  # a column is its own id

    def normalize_proprio(self, proprio: Any) -> np.ndarray:
        """[..., P] of the environment -> [-1, 1], float32."""
        return normalize_proprio(proprio, self.statistics["proprio"], mode=self.config.action_normalization)

    def normalize_actions(self, actions: np.ndarray) -> np.ndarray:
        """Environment actions [..., A, D] -> normalized ones, float32."""
        return self._normalized(actions).astype(np.float32)

    def _normalized(self, actions: np.ndarray) -> np.ndarray:
        return normalize_actions(actions, self.statistics["action"], mode=self.config.action_normalization)

    def unnormalize_actions(self, actions: np.ndarray) -> np.ndarray:
        """Normalized actions [..., A, D] -> environment actions, float32."""
        mode = self.config.action_normalization
        return unnormalize_actions(actions, self.statistics["action"], mode=mode, eps=RANGE_EPS).astype(np.float32)

    def encode_actions(self, actions: np.ndarray) -> np.ndarray:
        """Environment actions [..., A, D] -> bins [..., A*D] int64, as training labels."""
        bins = self._bins.encode(self._normalized(actions))
        return bins.reshape(*bins.shape[:-2], self.config.columns)

    def decode_actions(self, columns: np.ndarray) -> np.ndarray:
        """Bins [..., A*D] -> environment actions [..., A, D] float32."""
        columns = np.asarray(columns)
        shape = (*columns.shape[:-1], self.config.action_chunk_len, self.config.action_dim)
        return self.unnormalize_actions(self._bins.decode(columns).reshape(shape))

    @property
    def effective_tokens(self) -> Tensor:
        """[K] bool: columns whose bin can change the action."""
        bins = np.arange(self.config.n_action_bins)[:, None].repeat(self.config.columns, axis=1)
        return _varying(self.decode_actions(bins))

    @property
    def effective_numbers(self) -> Tensor:
        """[K] bool: like `effective_tokens`, for continuous actions."""
        shape = (self.config.action_chunk_len, self.config.action_dim)
        return _varying(self.unnormalize_actions(np.linspace(-1.0, 1.0, 5)[:, None, None] + np.zeros(shape)))

    @property
    def action_mask(self) -> list[bool]:
        """[D]: whether an action dimension is normalized by the statistics."""
        return [bool(kept) for kept in self.statistics["action"].get("mask") or [True] * self.config.action_dim]


def _varying(actions: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ptp(actions.reshape(len(actions), -1), axis=0) > _CONSTANT)

"""Continuous actions as tokens: 256 bin edges on [-1, 1], the last ids of the vocabulary (arXiv 2406.09246)."""

from __future__ import annotations

from typing import Any

import numpy as np


class ActionTokenizer:
    """Maps normalized actions to token ids and back.

    The `n_bins` edges are uniform on [-1, 1] and enclose `n_bins - 1` bins. Ids decrease as actions increase: the
    bin number `digitize(action)` in 1..n_bins becomes the id `vocab_size - digitize(action)`.

    With the defaults, for logits over the 256 action tokens:

    | column k | token id | center index (255 - k, at most 254) | action |
    |---|---|---|---|
    | 0 | 31744 | 254 | +0.996 (encodes exactly +1) |
    | 1 | 31745 | 254 | +0.996 |
    | 128 | 31872 | 127 | 0 |
    | 255 | 31999 | 0 | -0.996 |

    Args:
        vocab_size: size of the tokenizer's vocabulary, without padding rows.
        n_bins: number of action tokens, equal to the number of edges.
    """

    def __init__(self, vocab_size: int = 32000, n_bins: int = 256):
        if not 2 <= n_bins <= vocab_size:
            raise ValueError(f"n_bins is {n_bins}; it must be at least 2 and at most the vocabulary size {vocab_size}")
        self.vocab_size = vocab_size
        self.n_bins = n_bins
        self.bins = np.linspace(-1.0, 1.0, n_bins)
        self.bin_centers = (self.bins[:-1] + self.bins[1:]) / 2.0
        self.column_centers = self.bin_centers[np.clip(n_bins - 1 - np.arange(n_bins), 0, n_bins - 2)]

    @property
    def first_token_id(self) -> int:
        """Token id of logits column 0."""
        return self.vocab_size - self.n_bins

    def encode(self, actions: Any) -> np.ndarray:
        """Token ids (int64, same shape) of actions; values outside [-1, 1] are clipped.

        Raises:
            ValueError: an action is NaN.
        """
        actions = np.asarray(actions, dtype=np.float64)
        if np.isnan(actions).any():
            raise ValueError("actions contain NaN and cannot be encoded")
        return self.vocab_size - np.digitize(np.clip(actions, -1.0, 1.0), self.bins).astype(np.int64)

    def decode(self, ids: Any) -> np.ndarray:
        """Bin centers (float64, same shape) of token ids; ids outside the action range give the nearest bin."""
        ids = np.asarray(ids, dtype=np.int64)
        return self.bin_centers[np.clip(self.vocab_size - ids - 1, 0, self.n_bins - 2)]

    def ids_to_columns(self, ids: Any) -> Any:
        """Logits columns of token ids, for integer arrays and tensors alike."""
        return ids - self.first_token_id

    def columns_to_ids(self, columns: Any) -> Any:
        """Token ids of logits columns, for integer arrays and tensors alike."""
        return columns + self.first_token_id

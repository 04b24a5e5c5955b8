"""What a flow-matching policy computes once per decision."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Prefix:
    """What the action expert reads of the observations of B decisions.

    Attributes:
        keys: for each layer of the expert [B, kv_heads, P, head_dim], with position and projections applied.
        values: like keys.
        mask: [B, P] bool: False for padding and missing cameras.
        length: [B] int64, tokens that are no padding: the position of the first action.
        pooled: [B, d] float32, mean of the hidden states over the tokens that are no padding, where the last keys are
            computed; for a critic.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor
    length: Tensor
    pooled: Tensor

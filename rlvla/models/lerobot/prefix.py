"""What a flow-matching policy computes once per decision."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

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

    def rows(self, index: Tensor | slice) -> Prefix:
        """The prefix of some of the decisions."""

        def pick(value: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
            return tuple(part[index] for part in value) if isinstance(value, tuple) else value[index]

        return replace(self, **{entry.name: pick(getattr(self, entry.name)) for entry in fields(self)})

"""Aggregates the log-probs of a decision to token, action or chunk level, and regroups decisions into episodes.

A decision has K log-probs in action-major order, K / A for each of its A actions. At a given level they form L columns:
one per log-prob ("token", L = K), one per action ("action", L = A), or a single one ("chunk", L = 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEVEL_ORDER = {"token": 0, "action": 1, "chunk": 2}  # finest first


@dataclass(frozen=True)
class Columns:
    """Maps the K log-probs of a decision to L columns.

    Attributes:
        level: "token", "action" or "chunk".
        total: K.
        per_action: number of log-probs per action.
    """

    level: str
    total: int
    per_action: int

    @property
    def width(self) -> int:
        """Number of log-probs per column."""
        return {"token": 1, "action": self.per_action, "chunk": self.total}[self.level]

    @property
    def count(self) -> int:
        """L, the number of columns."""
        return self.total // self.width

    def first(self, values: Tensor) -> Tensor:
        """[..., K] -> [..., L]: the entry at the first log-prob of each column."""
        return values[..., :: self.width]

    def any(self, mask: Tensor) -> Tensor:
        """[..., K] bool -> [..., L]: whether any entry of a column is valid."""
        return mask.unflatten(-1, (-1, self.width)).any(-1)

    def sum(self, values: Tensor, mask: Tensor) -> Tensor:
        """[..., K] -> [..., L]: the sum over the valid entries of each column."""
        valid = torch.where(mask, values, torch.zeros_like(values))
        return valid.unflatten(-1, (-1, self.width)).sum(-1)

    def spread(self, values: Tensor) -> Tensor:
        """[..., L] -> [..., K]: repeats the entry of a column for each of its log-probs."""
        return values.repeat_interleave(self.width, dim=-1)

    def starts(self, mask: Tensor) -> Tensor:
        """[..., K] bool: valid entries at the first position of their column."""
        return mask & (torch.arange(mask.shape[-1], device=mask.device) % self.width == 0)

    def of_actions(self, values: Tensor, mask: Tensor) -> Tensor:
        """[..., A] -> [..., L]: sums per-action values; an action counts if its last log-prob is valid."""
        spread = values.new_zeros(mask.shape)
        spread[..., self.per_action - 1 :: self.per_action] = values
        return self.sum(spread, mask)


class EpisodeGrid:
    """Converts between rows [B, L], the concatenated decisions of all episodes, and [episodes, S_max * L].

    Args:
        decisions: number of decisions of each episode, in row order.
    """

    def __init__(self, decisions: Sequence[int]):
        counts = torch.tensor(decisions)
        self._episodes, self._longest = len(decisions), int(counts.max())
        self._episode = torch.arange(len(decisions)).repeat_interleave(counts)
        starts = counts.cumsum(0) - counts
        self._decision = torch.arange(int(counts.sum())) - starts[self._episode]

    def pack(self, values: Tensor) -> Tensor:
        """[B, L] -> [episodes, S_max * L], padded with zero (False)."""
        packed = values.new_zeros(self._episodes, self._longest, values.shape[1])
        packed[self._episode, self._decision] = values
        return packed.flatten(1)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """The inverse of `pack`."""
        return packed.unflatten(1, (self._longest, columns))[self._episode, self._decision]

"""Token grids seen at three levels: every token, every action (D tokens), or every chunk (A * D tokens).

T = A * D is the number of tokens of a decision; L is 1 column per token, per action or per chunk: T, A or 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVEL_ORDER = {"token": 0, "action": 1, "chunk": 2}  # from fine to coarse


def tokens_per_column(level: str, num_tokens: int, action_dim: int) -> int:
    """How many tokens one column of the level stands for."""
    return {"token": 1, "action": action_dim, "chunk": num_tokens}[level]


def first_of_column(values: Tensor, width: int) -> Tensor:
    """[..., T] -> [..., L]: the entry at the first token of each column."""
    return values[..., ::width]


def any_of_column(mask: Tensor, width: int) -> Tensor:
    """[..., T] bool -> [..., L]: whether a column has a valid token."""
    return mask.unflatten(-1, (-1, width)).any(-1)


def sum_columns(values: Tensor, mask: Tensor, width: int) -> Tensor:
    """[..., T] -> [..., L]: the sum over the valid tokens of each column."""
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.unflatten(-1, (-1, width)).sum(-1)


def spread_columns(values: Tensor, width: int) -> Tensor:
    """[..., L] -> [..., T]: every token of a column gets its entry."""
    return values.repeat_interleave(width, dim=-1)


def first_tokens(mask: Tensor, width: int) -> Tensor:
    """[..., T] bool: valid tokens that are the first of their column."""
    return mask & (torch.arange(mask.shape[-1], device=mask.device) % width == 0)

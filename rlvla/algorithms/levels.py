"""From action tokens to actions or whole chunks and back.

Advantages and probability ratios can live on tokens, on actions (all dimensions of one env step) or on chunks (all
actions of one decision). A level is described by its unit: how many neighbouring tokens form one entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_matrix, check_same_shape, clean, working_dtype

LEVELS = ("token", "action", "chunk")


def tokens_per_unit(level: str, action_dim: int, chunk_len: int) -> int:
    """How many tokens form one entry: 1, action_dim, or action_dim * chunk_len.

    Raises:
        ValueError: unknown level; the message lists the known ones.
    """
    units = {"token": 1, "action": action_dim, "chunk": action_dim * chunk_len}
    if level not in units:
        raise ValueError(f"unknown level {level!r}; known: {', '.join(LEVELS)}")
    return units[level]


def pool_mask(mask: Tensor, unit: int) -> Tensor:
    """[B, T] bool -> [B, T / unit] bool, True where an entry has a valid token.

    Raises:
        ValueError: mask not bool or not [B, T], or T not a multiple of the unit.
    """
    check_matrix(mask, "mask")
    return _blocks(mask, unit).any(-1)


def pool_sum(values: Tensor, mask: Tensor, unit: int) -> Tensor:
    """[B, T] -> [B, T / unit], sums over the valid tokens of each entry: log-probs or rewards of a level.

    Raises:
        ValueError: shapes differ, mask not bool, or T not a multiple of the unit.
    """
    check_matrix(mask, "mask")
    check_same_shape(mask, "mask", values=values)
    return _blocks(clean(values, mask, working_dtype(values)), unit).sum(-1)


def pool_first(values: Tensor, mask: Tensor, unit: int) -> Tensor:
    """[B, T] -> [B, T / unit], the first valid token of each entry (0 without one): the critic's value of a level.

    Raises:
        ValueError: shapes differ, mask not bool, or T not a multiple of the unit.
    """
    check_matrix(mask, "mask")
    check_same_shape(mask, "mask", values=values)
    first = _blocks(mask, unit).to(torch.uint8).argmax(-1, keepdim=True)
    return _blocks(clean(values, mask, working_dtype(values)), unit).gather(-1, first).squeeze(-1)


def spread(values: Tensor, mask: Tensor, unit: int) -> Tensor:
    """[B, T / unit] -> [B, T], each entry's value on its valid tokens, 0 elsewhere.

    Args:
        values: [B, T / unit].
        mask: [B, T] bool, the token mask.
        unit: tokens per entry.

    Raises:
        ValueError: mask not bool, T not a multiple of the unit, or values of another shape than the pooled mask.
    """
    expected = tuple(_blocks(mask, unit).shape[:2])
    check_matrix(mask, "mask")
    if tuple(values.shape) != expected:
        raise ValueError(f"values has shape {list(values.shape)} but the mask pooled by {unit} has {list(expected)}")
    return clean(values.repeat_interleave(unit, dim=-1), mask, working_dtype(values))


def _blocks(tensor: Tensor, unit: int) -> Tensor:
    if unit < 1 or tensor.shape[-1] % unit:
        raise ValueError(f"{tensor.shape[-1]} tokens are no whole number of units of {unit} tokens")
    return tensor.unflatten(-1, (tensor.shape[-1] // unit, unit))

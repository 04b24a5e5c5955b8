"""Validation of shapes, dtypes and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from rlvla.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def check_mask(mask: Tensor, name: str = "response_mask") -> None:
    """Require a bool tensor.

    Raises:
        ValueError: `mask` is not a tensor or not bool.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        actual = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"{name} must be a bool tensor, got {actual}; convert it with .bool()")


def check_same_shape(mask: Tensor, mask_name: str = "response_mask", **tensors: Tensor | None) -> None:
    """Require a bool mask and tensors of the same shape; None entries are skipped.

    Raises:
        ValueError: the mask is not bool, an argument is not a tensor, or shapes differ (both are named).
    """
    check_mask(mask, mask_name)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a tensor of shape {list(mask.shape)}, got {type(tensor).__name__}")
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} but {mask_name} has shape {list(mask.shape)}; "
                "they must be equal"
            )


def check_matrix(mask: Tensor, mask_name: str = "response_mask") -> None:
    """Require a bool mask of shape [rows, tokens].

    Raises:
        ValueError: not bool or not two-dimensional.
    """
    check_mask(mask, mask_name)
    if mask.dim() != 2:
        raise ValueError(f"{mask_name} must have shape [rows, tokens], got {list(mask.shape)}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Require exactly this shape, so that nothing is broadcast by mistake.

    Raises:
        ValueError: another shape.
    """
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")


def check_broadcast(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Require a shape that broadcasts to `shape`.

    Raises:
        ValueError: it does not.
    """
    fits = all(a in (1, b) for a, b in zip(reversed(tensor.shape), reversed(shape)))
    if tensor.dim() > len(shape) or not fits:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, which does not broadcast to {list(shape)}")


def check_number(name: str, value: float, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Require a number within [low, high].

    Raises:
        ValueError: NaN or out of range.
    """
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {value}")


def require_input(name: str, value: T | None, user: str) -> T:
    """An optional argument that `user` needs.

    Raises:
        ValueError: `value` is None.
    """
    if value is None:
        raise ValueError(f"{user} needs {name}; pass {name}=...")
    return value


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype to compute in: float64 if any input is, float32 otherwise."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    return torch.float32


def clean(tensor: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, 0 outside the mask, so that padding affects neither results nor gradients."""
    return tensor.to(dtype).masked_fill(~mask, 0.0)


def count_valid(mask: Tensor) -> Tensor:
    """Number of True entries as a scalar tensor; much faster than `sum` of a bool tensor."""
    return mask.count_nonzero()


def count_valid_per_row(mask: Tensor) -> Tensor:
    """[B, T] bool -> [B] float32 counts, exact below 16 million tokens; much faster than `sum` of a bool tensor."""
    return mask.to(torch.float32).sum(-1)

"""Masked statistics, local or over data-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlvla.algorithms.checks import check_same_shape, clean, working_dtype

EPSILON = 1e-8


def all_reduce_sum(tensor: Tensor, process_group: Any = None) -> Tensor:
    """Sum of a tensor over the ranks of a process group.

    Args:
        tensor: any shape; the same on every rank.
        process_group: None for no communication, "world" for the default group, or a torch.distributed group.

    Returns:
        The input itself without a process group, otherwise a new tensor without gradient, as the collective has none.
    """
    if process_group is None:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total, group=None if process_group == "world" else process_group)
    return total


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the valid entries.

    Args:
        values: any shape; what stands outside the mask is never read.
        mask: bool, the same shape.
        dim: dimension to reduce, None for all.

    Returns:
        A scalar, or the shape without `dim`; float64 for float64 input, float32 otherwise.

    Raises:
        ValueError: mask not bool, or shapes differ.
    """
    check_same_shape(mask, "mask", values=values)
    kept = clean(values, mask, working_dtype(values))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None, process_group: Any = None) -> Tensor:
    """Mean of the valid entries, sum / (count + 1e-8); 0 where nothing is valid.

    Args:
        values: any shape.
        mask: bool, the same shape.
        dim: dimension to reduce, None for all.
        process_group: see `all_reduce_sum`; the mean is then that of all ranks.

    Raises:
        ValueError: mask not bool, or shapes differ.
    """
    total = all_reduce_sum(masked_sum(values, mask, dim), process_group)
    count = mask.sum() if dim is None else mask.sum(dim)
    return total / (all_reduce_sum(count, process_group).to(total.dtype) + EPSILON)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True, process_group: Any = None) -> Tensor:
    """Variance of the valid entries around their masked mean.

    Args:
        values: any shape.
        mask: bool, the same shape.
        unbiased: Bessel's correction, n / (n - 1).
        process_group: see `all_reduce_sum`; the variance is then that of all ranks.

    Raises:
        ValueError: mask not bool, shapes differ, or fewer than 2 valid entries with `unbiased`.
    """
    return _moments(values, mask, unbiased, process_group)[1]


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, unbiased: bool = True, process_group: Any = None
) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8) with the masked moments.

    The result is not masked again: entries outside the mask are whitened like the others.

    Args:
        values: any shape.
        mask: bool, the same shape.
        shift_mean: False adds the mean back.
        unbiased: see `masked_var`.
        process_group: see `all_reduce_sum`; the moments are then those of all ranks.

    Raises:
        ValueError: mask not bool, shapes differ, or fewer than 2 valid entries with `unbiased`.
    """
    mean, variance = _moments(values, mask, unbiased, process_group)
    whitened = (values.to(mean.dtype) - mean) * torch.rsqrt(variance + EPSILON)
    return whitened if shift_mean else whitened + mean


def _moments(values: Tensor, mask: Tensor, unbiased: bool, process_group: Any) -> tuple[Tensor, Tensor]:
    """Masked mean and variance.

    The values are centred by their exact mean before they are squared, so that a large offset costs no digits.
    """
    total = all_reduce_sum(masked_sum(values, mask), process_group)
    count = all_reduce_sum(mask.sum(), process_group).to(total.dtype)
    if unbiased and count < 2:
        raise ValueError(
            f"the unbiased variance needs at least 2 valid entries, got {int(count)}; "
            "pass unbiased=False or a larger batch"
        )
    centred = clean(clean(values, mask, total.dtype) - total / count.clamp(min=1), mask, total.dtype)
    variance = all_reduce_sum(centred.square().sum(), process_group) / (count + EPSILON)
    return total / (count + EPSILON), variance * (count / (count - 1)) if unbiased else variance

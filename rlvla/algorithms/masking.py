"""Masked statistics, local or over all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.checks import check_same_shape, clean, count_valid, working_dtype
from rlvla.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


EPSILON = 1e-8
_BLOCK_ROWS = 4096


def all_reduce_sum(tensor: Tensor, process_group: Any = None) -> Tensor:
    """Sum of a tensor over the ranks of a process group.

    Args:
        tensor: any shape, the same on all ranks.
        process_group: None for no communication, "world" for the default group, or a torch.distributed group.

    Returns:
        The input itself without a process group; otherwise a new tensor without gradient.
    """
    if process_group is None:
        return tensor
    return _all_reduce(tensor, torch.distributed.ReduceOp.SUM, process_group)


def all_reduce_max(tensor: Tensor, process_group: Any = None) -> Tensor:
    """Maximum of a tensor over the ranks of a process group; arguments and result as in `all_reduce_sum`."""
    if process_group is None:
        return tensor
    return _all_reduce(tensor, torch.distributed.ReduceOp.MAX, process_group)


def _all_reduce(tensor: Tensor, operation: Any, process_group: Any) -> Tensor:
    result = tensor.detach().clone()
    torch.distributed.all_reduce(result, op=operation, group=None if process_group == "world" else process_group)
    return result


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the valid entries.

    Args:
        values: any shape; entries outside the mask are ignored.
        mask: bool, same shape as `values`.
        dim: dimension to reduce; None reduces all.

    Returns:
        A scalar, or the shape without `dim`; float64 for float64 input, float32 otherwise.

    Raises:
        ValueError: mask not bool, or shapes differ.
    """
    check_same_shape(mask, "mask", values=values)
    kept = clean(values, mask, working_dtype(values))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None, process_group: Any = None) -> Tensor:
    """Mean of the valid entries, sum / (count + 1e-8); 0 if none is valid.

    Args:
        values: any shape.
        mask: bool, same shape as `values`.
        dim: dimension to reduce; None reduces all.
        process_group: the mean is taken over all ranks, see `all_reduce_sum`.

    Raises:
        ValueError: mask not bool, or shapes differ.
    """
    total = all_reduce_sum(masked_sum(values, mask, dim), process_group)
    count = count_valid(mask) if dim is None else mask.sum(dim)
    return total / (all_reduce_sum(count, process_group).to(total.dtype) + EPSILON)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True, process_group: Any = None) -> Tensor:
    """Variance of the valid entries around their masked mean.

    Args:
        values: any shape.
        mask: bool, same shape as `values`.
        unbiased: apply Bessel's correction, n / (n - 1).
        process_group: the variance is taken over all ranks, see `all_reduce_sum`.

    Raises:
        ValueError: mask not bool, shapes differ, or fewer than 2 valid entries with `unbiased`.
    """
    return masked_moments(values, mask, unbiased, process_group)[1]


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, unbiased: bool = True, process_group: Any = None
) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8) with the masked moments; exactly 0 if all valid entries are equal.

    The result is not masked: entries outside the mask are whitened as well.

    Args:
        values: any shape.
        mask: bool, same shape as `values`.
        shift_mean: False keeps the original mean.
        unbiased: see `masked_var`.
        process_group: the moments are taken over all ranks, see `all_reduce_sum`.

    Raises:
        ValueError: mask not bool, shapes differ, or fewer than 2 valid entries with `unbiased`.
    """
    mean, variance = masked_moments(values, mask, unbiased, process_group)
    whitened = (values.to(mean.dtype) - mean) * torch.rsqrt(variance + EPSILON)
    return whitened if shift_mean else whitened + mean


def whiten_rows(row_values: Tensor, counts: Tensor, process_group: Any = None) -> Tensor:
    """`masked_whiten` for rows whose valid entries are all equal, without expanding them to [B, T].

    Args:
        row_values: [B].
        counts: [B], number of valid entries of each row.
        process_group: see `all_reduce_sum`.

    Returns:
        [B], whitened.

    Raises:
        ValueError: fewer than 2 valid entries.
    """
    weight = counts.to(row_values.dtype)
    valid = counts > 0
    values = row_values.masked_fill(~valid, 0.0)
    constant = _constant([row_values], [valid], row_values.dtype, process_group)
    total = all_reduce_sum((weight * values).sum(), process_group)
    count = all_reduce_sum(weight.sum(), process_group)
    centered = values - _exact(total / count.clamp(min=1), constant)
    squares = all_reduce_sum((weight * centered.square()).sum(), process_group)
    mean, variance = _finish_moments(total, count, squares, unbiased=True)
    return (row_values - _exact(mean, constant)) * torch.rsqrt(variance + EPSILON)


def whiten_per_task(values: Tensor, mask: Tensor, tasks: Tensor, num_tasks: int, process_group: Any = None) -> Tensor:
    """`masked_whiten` of the rows of each task by themselves; 0 outside the mask.

    Args:
        values: [B, T].
        mask: [B, T] bool.
        tasks: [B] int, from 0 to num_tasks - 1; every rank means the same tasks by them.
        num_tasks: the same on all ranks.
        process_group: the moments are taken over all ranks, see `all_reduce_sum`.

    Returns:
        [B, T]; 0 for a task with fewer than 2 valid entries, which has no variance.

    Raises:
        ValueError: mask not bool, or shapes differ.
    """
    result = torch.zeros_like(values, dtype=working_dtype(values))
    for task in range(num_tasks):
        of_task = mask & (tasks == task)[:, None]
        if all_reduce_sum(count_valid(of_task), process_group) > 1:
            result = torch.where(of_task, masked_whiten(values, of_task, process_group=process_group), result)
    return result


def masked_moments(
    values: Tensor, mask: Tensor, unbiased: bool = True, process_group: Any = None
) -> tuple[Tensor, Tensor]:
    """`masked_mean` and `masked_var` at once; exactly (v, 0) if all valid entries are v.

    Values are centered before they are squared, so that a large offset costs no precision. Rows are processed in
    blocks: copying a large batch would take longer than the arithmetic.
    """
    check_same_shape(mask, "mask", values=values)
    dtype = working_dtype(values)
    value_blocks, mask_blocks = values.split(_BLOCK_ROWS), mask.split(_BLOCK_ROWS)
    constant = _constant(value_blocks, mask_blocks, dtype, process_group)
    blocks = list(zip(value_blocks, mask_blocks))
    sums = [clean(block, block_mask, dtype).sum() for block, block_mask in blocks]
    total = all_reduce_sum(torch.stack(sums).sum(), process_group)
    count = all_reduce_sum(count_valid(mask), process_group).to(dtype)
    mean = _exact(total / count.clamp(min=1), constant)
    squares = [
        (clean(block, block_mask, dtype) - mean).masked_fill(~block_mask, 0.0).square().sum()
        for block, block_mask in blocks
    ]
    sum_of_squares = all_reduce_sum(torch.stack(squares).sum(), process_group)
    mean, variance = _finish_moments(total, count, sum_of_squares, unbiased)
    return _exact(mean, constant), variance


def _constant(values: Sequence[Tensor], masks: Sequence[Tensor], dtype: torch.dtype, process_group: Any) -> Tensor:
    """The value of all valid entries over all ranks, a scalar; NaN if they differ or there are none."""
    extremes = [torch.full((2,), -torch.inf, dtype=dtype, device=values[0].device)]
    for block, mask in zip(values, masks):
        if block.numel():
            low = torch.where(mask, block.detach(), torch.inf).amin()
            high = torch.where(mask, block.detach(), -torch.inf).amax()
            extremes.append(torch.stack([-low, high]).to(dtype))
    negative_low, high = all_reduce_max(torch.stack(extremes).amax(0), process_group)
    return torch.where(-negative_low == high, high, torch.nan)


def _exact(mean: Tensor, constant: Tensor) -> Tensor:
    """The mean without rounding error if all entries are equal.

    Otherwise the division by the standard deviation would turn its error into advantages: 2.4e-3 for returns of 2.3.
    """
    return torch.where(constant.isnan(), mean, mean + (constant - mean).detach())


def _finish_moments(total: Tensor, count: Tensor, squares: Tensor, unbiased: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance from the count, the sum and the sum of squared deviations from the exact mean."""
    if unbiased and count < 2:
        raise ValueError(
            f"the unbiased variance needs at least 2 valid entries, got {int(count)}; "
            "pass unbiased=False or a larger batch"
        )
    variance = squares / (count + EPSILON)
    return total / (count + EPSILON), variance * (count / (count - 1)) if unbiased else variance

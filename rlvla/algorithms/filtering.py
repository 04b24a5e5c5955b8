"""Filtering of groups of episodes (dynamic sampling, DAPO: Yu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_mask, check_number, require_input
from rlvla.algorithms.groups import GroupIds, Groups


@dataclass(frozen=True)
class FilterResult:
    """Outcome of `filter_groups`.

    Attributes:
        keep: [B] bool, True for the rows of kept groups.
        num_groups: number of groups.
        kept_groups: number of groups that are kept.
        dropped: reason -> number of dropped groups, for the filters that are enabled. A group counts under the first
            reason that applies, in the order `accuracy_low`, `accuracy_high`, `metric_low`, `metric_high`,
            `zero_variance`, `truncated`.
    """

    keep: Tensor
    num_groups: int
    kept_groups: int
    dropped: dict[str, int]


@torch.no_grad()
def filter_groups(
    group_ids: GroupIds,
    *,
    success: Tensor | None = None,
    accuracy_bounds: tuple[float, float] | None = None,
    metric: Tensor | None = None,
    metric_bounds: tuple[float, float] | None = None,
    scores: Tensor | None = None,
    truncated: Tensor | None = None,
) -> FilterResult:
    """Keep the groups that pass all enabled filters.

    Args:
        group_ids: one hashable id per episode.
        success: [B] bool, or success rates in [0, 1]; required by `accuracy_bounds`.
        accuracy_bounds: (lower, upper), inclusive; groups whose mean success is outside are dropped.
        metric: [B], a number for each episode; required by `metric_bounds`.
        metric_bounds: (lower, upper), inclusive; groups whose mean of `metric` is outside are dropped.
        scores: [B]; if given, groups whose scores are all equal are dropped.
        truncated: [B] bool; if given, groups with a truncated episode are dropped.

    Raises:
        ValueError: bounds out of order, accuracy bounds outside [0, 1], bounds without success or metric, or an input
            that is not [B].
    """
    num_rows = _num_rows(success, metric, scores, truncated)
    device = next(x.device for x in (success, metric, scores, truncated) if x is not None)
    groups = Groups(group_ids, num_rows, device)
    failed: dict[str, Tensor] = {}  # reason -> [B] bool
    if accuracy_bounds is not None:
        low, high = accuracy_bounds
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"accuracy_bounds must satisfy 0 <= lower <= upper <= 1, got {accuracy_bounds}")
        success = require_input("success", success, "accuracy_bounds")
        rate = groups.mean(success.to(torch.float64))
        failed["accuracy_low"] = rate < low
        failed["accuracy_high"] = rate > high
    if metric_bounds is not None:
        low, high = metric_bounds
        if not low <= high:
            raise ValueError(f"metric_bounds must satisfy lower <= upper, got {metric_bounds}")
        metric = require_input("metric", metric, "metric_bounds")
        mean = groups.mean(metric.to(torch.float64))
        failed["metric_low"] = mean < low
        failed["metric_high"] = ~(mean <= high) & ~(mean < low)  # NaN is outside
    if scores is not None:
        wide = scores.to(torch.float64)
        failed["zero_variance"] = groups.max(wide) == groups.min(wide)
    if truncated is not None:
        check_mask(truncated, "truncated")
        failed["truncated"] = groups.sum(truncated.to(torch.float64)) > 0
    keep = torch.ones(len(groups.index), dtype=torch.bool, device=groups.index.device)
    dropped = {}
    for reason, rows in failed.items():
        dropped[reason] = int((groups.sum_per_group((rows & keep).to(torch.float64)) > 0).sum())
        keep = keep & ~rows
    return FilterResult(keep, groups.count, groups.count - sum(dropped.values()), dropped)


def _num_rows(*tensors: Tensor | None) -> int:
    shapes = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
    if not shapes:
        raise ValueError("no filter is switched on: pass success or metric with bounds, scores or truncated")
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(
            f"success, metric, scores and truncated must all be [B], got shapes {[list(s) for s in shapes]}"
        )
    return shapes[0][0]


def groups_to_sample(missing: int, oversample_factor: float) -> int:
    """Number of groups to roll out so that `missing` more can be kept.

    Args:
        missing: groups that are still needed, not negative.
        oversample_factor: groups to start per group needed, at least 1.

    Raises:
        ValueError: a negative count or a factor below 1.
    """
    if missing < 0:
        raise ValueError(f"missing must not be negative, got {missing}")
    check_number("oversample_factor", oversample_factor, low=1.0)
    whole = int(missing * oversample_factor)
    return whole if whole >= missing * oversample_factor else whole + 1

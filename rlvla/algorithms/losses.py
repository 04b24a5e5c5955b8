"""Aggregation of per-token losses, and the value loss.

If counts of the whole optimizer step (all micro-batches of all ranks) are given, losses are divided by them and
multiplied by the number of data-parallel ranks, because gradients are averaged over ranks. Summed over micro-batches
and averaged over ranks, the result is then exactly the loss of the full batch. If the training engine divides each
micro-batch by the number of gradient accumulation steps, the caller has to undo that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvla.algorithms.checks import (
    check_matrix,
    check_number,
    check_same_shape,
    clean,
    count_valid,
    count_valid_per_row,
    working_dtype,
)
from rlvla.algorithms.choices import AGGREGATION_MODES
from rlvla.algorithms.groups import GroupIds, Groups
from rlvla.algorithms.lazy import no_grad, torch
from rlvla.algorithms.masking import EPSILON, masked_mean, masked_var

if TYPE_CHECKING:
    from torch import Tensor


_NEEDS_TOKENS = {"token-mean"}
_NEEDS_SEQUENCES = {"seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "traj-mean-token-mean"}


def aggregate_loss(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    dp_size: int = 1,
    horizon: float | None = None,
    trajectory_ids: GroupIds | None = None,
    trajectory_tokens: Tensor | None = None,
) -> Tensor:
    """Reduce a per-token loss to a scalar.

    Modes: `token-mean`: sum / num_tokens; `token-sum`: sum; `seq-mean-token-sum`: sum / num_sequences;
    `seq-mean-token-mean`: mean over each row's valid tokens, summed / num_sequences; `seq-mean-token-sum-norm`:
    seq-mean-token-sum / horizon; `traj-mean-token-mean`: mean over the valid tokens of each trajectory, which may span
    several rows, then over trajectories (num_sequences counts trajectories). All are multiplied by dp_size.

    Args:
        loss: [B, T]; entries outside the mask are ignored.
        mask: [B, T] bool.
        mode: one of `AGGREGATION_MODES`.
        num_tokens: valid tokens of the whole optimizer step over all ranks; None counts the local ones.
        num_sequences: rows with a valid token (trajectories in `traj-mean-token-mean`) of the whole optimizer step
            over all ranks; None counts the local ones.
        dp_size: number of data-parallel ranks whose gradients are averaged.
        horizon: divisor of `seq-mean-token-sum-norm`, default T.
        trajectory_ids: one hashable id per row, for `traj-mean-token-mean`; None treats each row as a trajectory.
        trajectory_tokens: [B], for `traj-mean-token-mean` with num_sequences: valid tokens of each row's trajectory
            over all micro-batches, see `count_trajectory_tokens`.

    Returns:
        Differentiable scalar; 0 for a batch without valid tokens.

    Raises:
        ValueError: unknown mode, shapes differ, mask not bool, a global count missing with dp_size > 1, or a count or
            horizon that is not positive.
    """
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"unknown aggregation mode {mode!r}; known: {', '.join(AGGREGATION_MODES)}")
    check_matrix(mask, "mask")
    check_same_shape(mask, "mask", loss=loss)
    _check_counts(mode, num_tokens, num_sequences, dp_size, horizon)
    kept = clean(loss, mask, working_dtype(loss))
    if mode == "token-sum":
        return kept.sum() * dp_size
    if mode == "token-mean":
        return kept.sum() / _count(count_valid(mask), num_tokens) * dp_size
    if mode == "traj-mean-token-mean":
        return _trajectory_mean(kept, mask, num_sequences, trajectory_ids, trajectory_tokens) * dp_size
    rows = kept.sum(-1)
    if mode == "seq-mean-token-mean":
        rows = rows / (count_valid_per_row(mask).to(kept.dtype) + EPSILON)
    total = rows.sum() / _count(count_valid(count_valid_per_row(mask) > 0), num_sequences) * dp_size
    if mode == "seq-mean-token-sum-norm":
        return total / (mask.shape[-1] if horizon is None else horizon)
    return total


def count_trajectory_tokens(mask: Tensor, trajectory_ids: GroupIds) -> Tensor:
    """Valid tokens of each row's trajectory, [B] int64, to be computed before rows are split into micro-batches.

    Args:
        mask: [B, T] bool, all rows of the optimizer step.
        trajectory_ids: one hashable id per row.

    Raises:
        ValueError: mask not bool or not [B, T], or not one id per row.
    """
    check_matrix(mask, "mask")
    return Groups(trajectory_ids, len(mask), mask.device).sum(mask.sum(-1))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    clip: float | None = None,
    agg_mode: str = "token-mean",
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    dp_size: int = 1,
    horizon: float | None = None,
    trajectory_ids: GroupIds | None = None,
    trajectory_tokens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the critic, clipped around the old values (Schulman et al. 2017).

    0.5 * aggregate(max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)).

    Args:
        values: [B, T], with gradient.
        old_values: [B, T], the critic's values before the update.
        returns: [B, T], regression targets.
        response_mask: [B, T] bool.
        clip: c, in units of the return; None disables clipping.
        agg_mode: see `aggregate_loss`.
        num_tokens: see `aggregate_loss`.
        num_sequences: see `aggregate_loss`.
        dp_size: see `aggregate_loss`.
        horizon: see `aggregate_loss`.
        trajectory_ids: see `aggregate_loss`.
        trajectory_tokens: see `aggregate_loss`.

    Returns:
        Scalar loss and {"vf_clipfrac": fraction of valid tokens where the clipped error is larger}.

    Raises:
        ValueError: shapes differ, mask not bool, negative clip, or see `aggregate_loss`.
    """
    check_matrix(response_mask)
    check_same_shape(response_mask, values=values, old_values=old_values, returns=returns)
    dtype = working_dtype(values, returns)
    values, old_values, returns = (clean(x, response_mask, dtype) for x in (values, old_values.detach(), returns))
    error, clipped = _clipped_error(values, old_values, returns, clip)
    loss = 0.5 * aggregate_loss(
        error,
        response_mask,
        agg_mode,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        dp_size=dp_size,
        horizon=horizon,
        trajectory_ids=trajectory_ids,
        trajectory_tokens=trajectory_tokens,
    )
    return loss, {"vf_clipfrac": masked_mean(clipped.to(dtype), response_mask)}


def _clipped_error(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Per-token squared error, and where the clipped error is larger."""
    plain = torch.square(values - returns)
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    check_number("clip", clip, low=0.0)
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    clipped = torch.square(near - returns)
    return torch.maximum(plain, clipped), clipped > plain


@no_grad
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, process_group: Any = None) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the mask; 1 for a perfect critic, 0 for a constant one.

    Args:
        values: [B, T].
        returns: [B, T].
        mask: [B, T] bool.
        process_group: variances are taken over all ranks, see `masking.all_reduce_sum`.

    Returns:
        A scalar; 0 if the returns are constant.

    Raises:
        ValueError: shapes differ or mask not bool.
    """
    check_same_shape(mask, "mask", values=values, returns=returns)
    total = masked_var(returns, mask, unbiased=False, process_group=process_group)
    rest = masked_var(returns - values, mask, unbiased=False, process_group=process_group)
    return torch.where(total > 0, 1.0 - rest / total.clamp(min=torch.finfo(total.dtype).tiny), torch.zeros_like(total))


def _check_counts(
    mode: str,
    num_tokens: float | Tensor | None,
    num_sequences: float | Tensor | None,
    dp_size: int,
    horizon: float | None,
) -> None:
    if dp_size < 1:
        raise ValueError(f"dp_size must be at least 1, got {dp_size}")
    missing = [
        name
        for name, value, users in (
            ("num_tokens", num_tokens, _NEEDS_TOKENS),
            ("num_sequences", num_sequences, _NEEDS_SEQUENCES),
        )
        if mode in users and value is None
    ]
    if dp_size > 1 and missing:
        raise ValueError(
            f"aggregation mode {mode!r} with dp_size {dp_size} needs {missing[0]}, counted over all ranks: "
            "a local count would weigh ranks unequally"
        )
    for name, value in (("num_tokens", num_tokens), ("num_sequences", num_sequences), ("horizon", horizon)):
        if value is not None and not float(value) > 0:
            raise ValueError(f"{name} must be positive, got {float(value)}")


def _count(local: Tensor, total: float | Tensor | None) -> float | Tensor:
    """The given count, or the local one, at least 1 so that an empty batch gives 0 rather than NaN."""
    return local.clamp(min=1) if total is None else total


def _trajectory_mean(
    kept: Tensor,
    mask: Tensor,
    num_trajectories: float | Tensor | None,
    trajectory_ids: GroupIds | None,
    trajectory_tokens: Tensor | None,
) -> Tensor:
    ids: GroupIds = torch.arange(len(mask)) if trajectory_ids is None else trajectory_ids
    groups = Groups(ids, len(mask), mask.device)
    tokens = mask.sum(-1)
    if trajectory_tokens is not None:
        if tuple(trajectory_tokens.shape) != (len(mask),):
            raise ValueError(
                f"trajectory_tokens has shape {list(trajectory_tokens.shape)} but mask has shape {list(mask.shape)}; "
                "one count per row is expected"
            )
        row_tokens = trajectory_tokens.to(kept.device)
    elif num_trajectories is not None and trajectory_ids is not None:
        raise ValueError(
            "traj-mean-token-mean with global counts needs trajectory_tokens, because a trajectory may be cut by a "
            "micro-batch; count them beforehand with count_trajectory_tokens"
        )
    else:
        row_tokens = groups.sum(tokens)
    local = (groups.sum_per_group(tokens) > 0).sum()
    return (kept.sum(-1) / row_tokens.clamp(min=1)).sum() / _count(local, num_trajectories)

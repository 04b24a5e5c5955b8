"""Losses that take the more pessimistic of a clipped and an unclipped ratio: PPO, GSPO, GMPO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.checks import count_valid_per_row
from rlvla.algorithms.losses import aggregate_loss
from rlvla.algorithms.masking import EPSILON
from rlvla.algorithms.policy_losses.common import PolicyInputs, check_clip, prepare
from rlvla.algorithms.policy_losses.registry import register_policy_loss

_GSPO_LOG_RATIO_CAP = 10.0
_GEOMETRIC_WEIGHT_FLOOR = 1e-10


@register_policy_loss("ppo")
def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
    agg_mode: str = "token-mean",
    rollout_weights: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate (Schulman et al. 2017), with the dual clip of Ye et al. 2020 as an option.

    max(-A rho, -A clip(rho, 1 - low, 1 + high)), with the log-ratio clamped to +-20; where A < 0 and `clip_dual` is
    given, at most -A clip_dual.

    Args:
        log_probs: [B, T], with gradient.
        old_log_probs: [B, T].
        advantages: [B, T].
        response_mask: [B, T] bool.
        clip_low: distance of the lower ratio bound from 1.
        clip_high: distance of the upper ratio bound from 1, at least `clip_low`.
        clip_dual: largest ratio that counts for a negative advantage, above 1; None for no such bound.
        agg_mode: see `losses.aggregate_loss`.
        rollout_weights: [B, T] factors on the per-token loss, or None.
        **extra: aggregation counts, see `rlvla.algorithms.policy_losses`.

    Returns:
        Scalar loss, and metrics: `pg_clipfrac` (share of valid tokens where the clipped term is the larger one),
        `pg_clipfrac_lower` (share where the dual clip is active), `ppo_kl` (mean of -log-ratio).

    Raises:
        ValueError: shapes differ, mask not bool, bad clip bounds, or see `losses.aggregate_loss`.
    """
    check_clip(clip_low, clip_high)
    if clip_dual is not None and not clip_dual > 1.0:
        raise ValueError(f"clip_dual must be above 1, got {clip_dual}; pass None for no dual clip")
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    log_ratio = inputs.bounded_log_ratio
    loss, clipped = pessimistic(inputs.advantages, log_ratio.exp(), clip_low, clip_high)
    capped = None
    if clip_dual is not None:
        cap = -inputs.advantages * clip_dual
        capped = (inputs.advantages < 0) & (loss > cap)
        loss = torch.where(inputs.advantages < 0, torch.minimum(loss, cap), loss)
    return inputs.aggregate(loss, agg_mode, extra), inputs.metrics(log_ratio, clipped, capped)


def pessimistic(advantages: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Per-token max of the plain and the clipped loss, and where the clipped one is the larger."""
    cost = -advantages
    plain, clipped = cost * ratio, cost * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), clipped > plain


@register_policy_loss("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    rollout_weights: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sequence-level ratio with token-level gradients (GSPO-token, Zheng et al. 2025).

    log s_t = sg[mean of the row's log-ratios] + log_probs - sg[log_probs], at most 10, in the clipped surrogate of
    `ppo`. Always aggregated seq-mean-token-mean, whatever `agg_mode` asks.

    Args:
        log_probs: [B, T], with gradient.
        old_log_probs: [B, T].
        advantages: [B, T].
        response_mask: [B, T] bool.
        clip_low: distance of the lower ratio bound from 1; sequence ratios move little, 3e-4 is usual.
        clip_high: distance of the upper ratio bound from 1, at least `clip_low`.
        rollout_weights: [B, T] factors on the per-token loss, or None.
        **extra: aggregation counts, see `rlvla.algorithms.policy_losses`.

    Returns:
        Scalar loss and metrics, see `ppo`.

    Raises:
        ValueError: shapes differ, mask not bool, bad clip bounds, or see `losses.aggregate_loss`.
    """
    check_clip(clip_low, clip_high)
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    tokens = count_valid_per_row(inputs.mask).unsqueeze(-1).clamp(min=1)
    row_log_ratio = (inputs.log_ratio.sum(-1, keepdim=True) / tokens).detach()
    log_ratio = (inputs.log_probs - inputs.log_probs.detach() + row_log_ratio).clamp(max=_GSPO_LOG_RATIO_CAP)
    loss, clipped = pessimistic(inputs.advantages, log_ratio.exp(), clip_low, clip_high)
    return inputs.aggregate(loss, "seq-mean-token-mean", extra), inputs.metrics(inputs.log_ratio, clipped)


@register_policy_loss("geo_mean")
def geo_mean(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    rollout_weights: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Geometric-mean policy optimisation (GMPO, Zhao et al. 2025).

    Each token's log-ratio is clipped on the side that would help (to clip_high where A > 0, to -clip_low where A < 0);
    the row's ratio is the exponential of their mean; the loss is minus the row's mean advantage times that ratio,
    averaged over the rows, or divided by `num_sequences` and multiplied by `dp_size` when these are given. `agg_mode`
    has no bearing: there is no per-token loss. Rollout weights enter as each row's geometric mean.

    Args:
        log_probs: [B, T], with gradient.
        old_log_probs: [B, T].
        advantages: [B, T].
        response_mask: [B, T] bool.
        clip_low: bound on how far the log-ratio may fall; 0.4 is usual.
        clip_high: bound on how far the log-ratio may rise, at least `clip_low`.
        rollout_weights: [B, T] factors, or None.
        **extra: `num_sequences` and `dp_size`, see `losses.aggregate_loss`.

    Returns:
        Scalar loss, and metrics: `pg_clipfrac` and `pg_clipfrac_lower` (shares of valid tokens outside the bounds with
        a positive and with a negative advantage), `ppo_kl`.

    Raises:
        ValueError: shapes differ, mask not bool, bad clip bounds, or dp_size > 1 without num_sequences.
    """
    check_clip(clip_low, clip_high)
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    sign = inputs.advantages.sign()
    bounded = inputs.log_ratio.clamp(-clip_low, clip_high)
    log_ratio = sign * torch.minimum(sign * inputs.log_ratio, sign * bounded)
    row_loss = -_row_mean(inputs, inputs.advantages) * _row_mean(inputs, log_ratio).exp()
    if inputs.rollout_weights is not None:
        log_weights = (inputs.rollout_weights + _GEOMETRIC_WEIGHT_FLOOR).log()
        row_loss = row_loss * _row_mean(inputs, log_weights.masked_fill(~inputs.mask, 0.0)).exp()
    clipped = bounded != inputs.log_ratio
    metrics = inputs.metrics(inputs.log_ratio, clipped & (inputs.advantages > 0), clipped & (inputs.advantages < 0))
    return _mean_over_rows(row_loss, extra), metrics


def _row_mean(inputs: PolicyInputs, values: Tensor) -> Tensor:
    """[B, T] with zeros outside the mask -> [B]; 0 for a row without valid tokens."""
    return values.sum(-1) / (count_valid_per_row(inputs.mask).to(values.dtype) + EPSILON)


def _mean_over_rows(row_loss: Tensor, options: dict[str, Any]) -> Tensor:
    """[B] -> scalar, by the global count of rows when it is given."""
    row = torch.ones((len(row_loss), 1), dtype=torch.bool, device=row_loss.device)
    counts = {name: options[name] for name in ("num_sequences", "dp_size") if name in options}
    return aggregate_loss(row_loss.unsqueeze(-1), row, "seq-mean-token-sum", **counts)

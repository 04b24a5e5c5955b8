"""Losses that take the more pessimistic of a clipped and an unclipped ratio: PPO, GSPO, GMPO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.policy_losses.common import check_clip, prepare
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
    loss, clipped = _pessimistic(inputs.advantages, log_ratio.exp(), clip_low, clip_high)
    capped = None
    if clip_dual is not None:
        cap = -inputs.advantages * clip_dual
        capped = (inputs.advantages < 0) & (loss > cap)
        loss = torch.where(inputs.advantages < 0, torch.minimum(loss, cap), loss)
    return inputs.aggregate(loss, agg_mode, extra), inputs.metrics(log_ratio, clipped, capped)


def _pessimistic(advantages: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Per-token max of the plain and the clipped loss, and where the clipped one is the larger."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), clipped > plain

"""Losses whose gradient is the score function times a weight: GPG, CISPO, SAPO, DRO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_number
from rlvla.algorithms.policy_losses.common import prepare
from rlvla.algorithms.policy_losses.registry import register_policy_loss


@register_policy_loss("gpg")
def gpg(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg_mode: str = "token-mean",
    rollout_weights: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient without importance weights, -A log_probs (GPG, Chu et al. 2025); unbiased on-policy only.

    Args:
        old_log_probs: [B, T], for the metric `ppo_kl` only.
    """
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    loss = -inputs.advantages * inputs.log_probs
    return inputs.aggregate(loss, agg_mode, extra), inputs.metrics(inputs.log_ratio)


@register_policy_loss("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    agg_mode: str = "token-mean",
    rollout_weights: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped importance weights without clipped gradients (CISPO, MiniMax 2025).

    -sg[clip(rho, 1 - clip_low, 1 + clip_high)] A log_probs, with the log-ratio clamped to +-20. `clip_low` may exceed
    `clip_high`; at 1 or above it leaves the ratio unbounded below.
    """
    check_number("clip_low", clip_low, low=0.0)
    check_number("clip_high", clip_high, low=0.0)
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    log_ratio = inputs.bounded_log_ratio.detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * inputs.advantages * inputs.log_probs
    return inputs.aggregate(loss, agg_mode, extra), inputs.metrics(log_ratio, weight != ratio)


@register_policy_loss("sapo")
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    rollout_weights: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Soft gating instead of clipping (SAPO, Gao et al. 2025).

    -A sigmoid(tau (rho - 1)) 4 / tau, with tau_pos where A > 0 and tau_neg elsewhere, and the log-ratio clamped to
    +-20. Always aggregated as seq-mean-token-mean; `agg_mode` is ignored.

    Args:
        tau_pos: temperature for positive advantages, above 0.
        tau_neg: temperature for the others, above 0; larger values dampen them more.
    """
    if not tau_pos > 0 or not tau_neg > 0:
        raise ValueError(f"tau_pos and tau_neg must be positive, got {tau_pos} and {tau_neg}")
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    log_ratio = inputs.bounded_log_ratio
    tau = torch.full_like(inputs.advantages, tau_neg).masked_fill_(inputs.advantages > 0, tau_pos)
    loss = -inputs.advantages * torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    return inputs.aggregate(loss, "seq-mean-token-mean", extra), inputs.metrics(log_ratio)


@register_policy_loss("dro")
def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    beta: float = 0.1,
    agg_mode: str = "token-mean",
    rollout_weights: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct reward optimization (Richemond et al. 2024): -(A log_probs - beta / 2 (log-ratio)^2).

    Args:
        beta: weight of the quadratic penalty towards the old policy, not negative.
    """
    check_number("beta", beta, low=0.0)
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    loss = 0.5 * beta * inputs.log_ratio.square() - inputs.advantages * inputs.log_probs
    return inputs.aggregate(loss, agg_mode, extra), inputs.metrics(inputs.log_ratio)

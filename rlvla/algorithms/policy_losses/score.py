"""Losses whose gradient is the score function times a weight: GPG, CISPO, DRO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.checks import check_number
from rlvla.algorithms.policy_losses.common import TWO_WIDTHS, ClipOptions, prepare
from rlvla.algorithms.policy_losses.registry import register_policy_loss
from rlvla.options import Options, arg

if TYPE_CHECKING:
    from torch import Tensor


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


@dataclass(frozen=True)
class CISPOOptions(ClipOptions):
    """Bounds of the importance weights; a lower width of 1 or more leaves them unbounded below."""

    eps_clip_low_high: tuple[float, ...] = arg(
        (),
        "two clip widths instead of --eps_clip: below and above 1, e.g. 0.2 0.28",
        above=0,
        metavar="EPS",
        check=(lambda widths: len(widths) == 2 and (widths[0] <= widths[1] or widths[0] >= 1), TWO_WIDTHS),
    )


@register_policy_loss("cispo", options=CISPOOptions)
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


@dataclass(frozen=True)
class DROOptions(Options):
    """Penalty towards the old policy."""

    beta: float = arg(0.1, "weight of the squared log-ratio", minimum=0)


@register_policy_loss("dro", options=DROOptions)
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

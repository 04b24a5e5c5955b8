"""Divergence proximal policy optimization (DPPO, 2026): tokens outside a trust region are masked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvla.algorithms.checks import check_number
from rlvla.algorithms.lazy import torch
from rlvla.algorithms.policy_losses.common import DualClipOptions, PolicyInputs, prepare
from rlvla.algorithms.policy_losses.registry import register_policy_loss

if TYPE_CHECKING:
    from torch import Tensor


_DEFAULT_RATIO_CAP = 20.0
_LOG_FLOOR = 1e-8


@register_policy_loss("dppo_tv", options=DualClipOptions, needs={"probabilities"})
def dppo_tv(
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
    """-A sg[min(rho, c)] log_probs inside a total-variation trust region.

    A token is inside while p - p_old <= clip_high where A > 0, and while p - p_old >= -clip_low elsewhere.

    Args:
        clip_low: how far a probability may fall.
        clip_high: how far a probability may rise.
        clip_dual: c, the cap on the ratio; None means 20.

    Returns:
        Loss and metrics; `pg_clipfrac` is the fraction of valid tokens outside the region, `pg_clipfrac_lower` the
        fraction inside it whose ratio was capped.
    """
    _check_bounds(clip_low, clip_high, clip_dual)
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    moved = inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()
    gains = inputs.advantages > 0
    inside = (gains & (moved <= clip_high)) | (~gains & (moved >= -clip_low))
    return _region_loss(inputs, inside, clip_dual, agg_mode, extra)


@register_policy_loss("dppo_kl", options=DualClipOptions, needs={"probabilities"})
def dppo_kl(
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
    """-A sg[min(rho, c)] log_probs inside a trust region of the binary KL.

    The binary KL is KL((p_old, 1 - p_old) || (p, 1 - p)). A token is inside if the KL is at most clip_high or
    p <= p_old where A > 0, and if it is at most clip_low or p >= p_old elsewhere.

    Args:
        clip_low: largest KL of a falling probability.
        clip_high: largest KL of a rising probability.
        clip_dual: c, the cap on the ratio; None means 20.

    Returns:
        Loss and metrics as in `dppo_tv`.
    """
    _check_bounds(clip_low, clip_high, clip_dual)
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    log_new, log_old = inputs.log_probs.detach(), inputs.old_log_probs
    new, old = log_new.exp(), log_old.exp()
    other = torch.log((1.0 - old + _LOG_FLOOR) / (1.0 - new + _LOG_FLOOR))
    divergence = old * (log_old - log_new) + (1.0 - old) * other
    rising = (divergence <= clip_high) | (new <= old)
    falling = (divergence <= clip_low) | (new >= old)
    gains = inputs.advantages > 0
    return _region_loss(inputs, (gains & rising) | (~gains & falling), clip_dual, agg_mode, extra)


def _region_loss(
    inputs: PolicyInputs, inside: Tensor, clip_dual: float | None, agg_mode: str, options: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    cap = _DEFAULT_RATIO_CAP if clip_dual is None else clip_dual
    log_ratio = inputs.bounded_log_ratio.detach()
    ratio = log_ratio.exp()
    loss = -inputs.advantages * ratio.clamp(max=cap) * inputs.log_probs
    loss = loss.masked_fill(~inside, 0.0)
    return inputs.aggregate(loss, agg_mode, options), inputs.metrics(log_ratio, ~inside, inside & (ratio > cap))


def _check_bounds(clip_low: float, clip_high: float, clip_dual: float | None) -> None:
    check_number("clip_low", clip_low, low=0.0)
    check_number("clip_high", clip_high, low=0.0)
    if clip_dual is not None and not clip_dual > 0:
        raise ValueError(f"clip_dual must be positive, got {clip_dual}; pass None for {_DEFAULT_RATIO_CAP:g}")

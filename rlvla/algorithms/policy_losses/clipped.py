"""Losses with a clipped probability ratio: PPO, GSPO, GMPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvla.algorithms.checks import count_valid_per_row
from rlvla.algorithms.lazy import torch
from rlvla.algorithms.policy_losses.common import ClipOptions, DualClipOptions, check_clip, prepare
from rlvla.algorithms.policy_losses.registry import register_policy_loss

if TYPE_CHECKING:
    from torch import Tensor


_GSPO_LOG_RATIO_CAP = 10.0


@register_policy_loss("ppo", options=DualClipOptions)
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
    """Clipped surrogate (Schulman et al. 2017), optionally with dual clipping (Ye et al. 2020).

    max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), with the log-ratio clamped to +-20. With `clip_dual`, the
    loss is at most -A clip_dual where A < 0.

    Args:
        clip_dual: above 1; None disables dual clipping.
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
    """Per-token maximum of the unclipped and the clipped loss, and where the clipped loss is larger."""
    cost = -advantages
    plain, clipped = cost * ratio, cost * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), clipped > plain


@register_policy_loss("gspo", options=ClipOptions)
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

    The clipped surrogate of `ppo` with log s_t = sg[mean log-ratio of the row] + log_probs - sg[log_probs], capped at
    10. Always aggregated as seq-mean-token-mean; `agg_mode` is ignored.

    Args:
        clip_low: sequence-level ratios move little: 3e-4 is a common choice.
    """
    check_clip(clip_low, clip_high)
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    tokens = count_valid_per_row(inputs.mask).unsqueeze(-1).clamp(min=1)
    row_log_ratio = (inputs.log_ratio.sum(-1, keepdim=True) / tokens).detach()
    log_ratio = (inputs.log_probs - inputs.log_probs.detach() + row_log_ratio).clamp(max=_GSPO_LOG_RATIO_CAP)
    loss, clipped = pessimistic(inputs.advantages, log_ratio.exp(), clip_low, clip_high)
    return inputs.aggregate(loss, "seq-mean-token-mean", extra), inputs.metrics(inputs.log_ratio, clipped)


@register_policy_loss("geo_mean", options=ClipOptions)
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
    """Geometric-mean policy optimization (GMPO, Zhao et al. 2025).

    The log-ratio of each token is clipped from above at clip_high where A > 0 and from below at -clip_low where A < 0.
    The ratio of a row is the exponential of their mean, and its loss is minus the row's mean advantage times that
    ratio. Losses are averaged over rows; `num_sequences` and `dp_size` work as in `aggregate_loss`. There is no
    per-token loss, so `agg_mode` is ignored, and `rollout_weights` enter as the geometric mean of each row.

    Args:
        clip_low: bound on the log-ratio, not on the ratio; 0.4 is a common choice.
        clip_high: bound on the log-ratio, at least `clip_low`.

    Returns:
        Loss and metrics; `pg_clipfrac` and `pg_clipfrac_lower` are the fractions of valid tokens outside the bounds
        with a positive and with a negative advantage.
    """
    check_clip(clip_low, clip_high)
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    sign = inputs.advantages.sign()
    bounded = inputs.log_ratio.clamp(-clip_low, clip_high)
    log_ratio = sign * torch.minimum(sign * inputs.log_ratio, sign * bounded)
    row_loss = -inputs.row_mean(inputs.advantages) * inputs.row_mean(log_ratio).exp()
    clipped = bounded != inputs.log_ratio
    metrics = inputs.metrics(inputs.log_ratio, clipped & (inputs.advantages > 0), clipped & (inputs.advantages < 0))
    return inputs.mean_over_rows(row_loss, extra), metrics

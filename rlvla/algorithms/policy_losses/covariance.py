"""Losses that watch the tokens whose advantage and log-prob vary together, which is where entropy is lost.

Both come from Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models". Means
and shares are those of the rows at hand; whoever cuts an optimiser step into several calls chooses the tokens of the
whole step first (`TOKEN_CHOICES`), and hands each call its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_number, check_same_shape, count_valid
from rlvla.algorithms.policy_losses.clipped import pessimistic
from rlvla.algorithms.policy_losses.common import PolicyInputs, check_clip, prepare
from rlvla.algorithms.policy_losses.registry import register_policy_loss


@register_policy_loss("clip_cov")
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    agg_mode: str = "token-mean",
    rollout_weights: Tensor | None = None,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
    chosen: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate in which some tokens of high covariance contribute nothing.

    Neither dual clip nor clamped log-ratio.

    Args:
        log_probs: [B, T], with gradient.
        old_log_probs: [B, T].
        advantages: [B, T].
        response_mask: [B, T] bool.
        clip_low: distance of the lower ratio bound from 1.
        clip_high: distance of the upper ratio bound from 1, at least `clip_low`.
        agg_mode: see `losses.aggregate_loss`.
        rollout_weights: [B, T] factors on the per-token loss, or None.
        cov_ratio: see `choose_for_clip_cov`, as the next three.
        cov_low: lower bound of the covariance.
        cov_high: upper bound of the covariance, at least `cov_low`.
        generator: source of the random choice.
        chosen: [B, T] bool, the tokens that contribute nothing; None to choose them among these rows.
        **extra: aggregation counts, see `rlvla.algorithms.policy_losses`.

    Returns:
        Scalar loss and metrics; `pg_clipfrac` is the share of valid tokens that were dropped.

    Raises:
        ValueError: shapes differ, mask not bool, a number out of range, or see `losses.aggregate_loss`.
    """
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    if chosen is None:
        chosen = choose_for_clip_cov(
            log_probs,
            old_log_probs,
            advantages,
            response_mask,
            clip_low=clip_low,
            clip_high=clip_high,
            cov_ratio=cov_ratio,
            cov_low=cov_low,
            cov_high=cov_high,
            generator=generator,
        )
    check_same_shape(chosen, "chosen", response_mask=response_mask)
    loss, _ = pessimistic(inputs.advantages, inputs.log_ratio.exp(), clip_low, clip_high)
    loss = torch.where(chosen, torch.zeros_like(loss), loss)
    return inputs.aggregate(loss, agg_mode, extra), inputs.metrics(inputs.log_ratio, chosen)


def choose_for_clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
    **extra: Any,
) -> Tensor:
    """The tokens that `clip_cov` drops.

    Among the valid tokens that the clip has not caught and whose covariance (A - mean A)(log_prob - mean log_prob)
    lies strictly between `cov_low` and `cov_high`, a random `cov_ratio` of the number of valid tokens (at least 1).

    Args:
        log_probs: [B, T].
        old_log_probs: [B, T].
        advantages: [B, T].
        response_mask: [B, T] bool.
        clip_low: distance of the lower ratio bound from 1.
        clip_high: distance of the upper ratio bound from 1, at least `clip_low`.
        cov_ratio: share of the valid tokens to drop, in (0, 1].
        cov_low: lower bound of the covariance.
        cov_high: upper bound of the covariance, at least `cov_low`.
        generator: source of the random choice, on the CPU; None for torch's global one.
        **extra: what else the loss is told; not read.

    Returns:
        [B, T] bool.

    Raises:
        ValueError: shapes differ, mask not bool, or a number out of range.
    """
    check_clip(clip_low, clip_high)
    _check_share(cov_ratio)
    if not cov_low <= cov_high:
        raise ValueError(f"cov_low must not exceed cov_high, got {cov_low} and {cov_high}")
    inputs = prepare(log_probs.detach(), old_log_probs, advantages, response_mask, None)
    _, clipped = pessimistic(inputs.advantages, inputs.log_ratio.exp(), clip_low, clip_high)
    covariance = _covariance(inputs)
    candidate = inputs.mask & ~clipped & (covariance > cov_low) & (covariance < cov_high)
    places = candidate.flatten().nonzero().squeeze(-1)
    order = torch.randperm(len(places), generator=generator).to(places.device)
    return _marked(inputs, places[order[: _share_count(inputs, cov_ratio)]])


@register_policy_loss("kl_cov")
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    agg_mode: str = "token-mean",
    rollout_weights: Tensor | None = None,
    cov_ratio: float = 2e-4,
    kl_coef: float = 1.0,
    chosen: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A rho, plus kl_coef |log-ratio| on the valid tokens of highest covariance. No clipping.

    Args:
        log_probs: [B, T], with gradient.
        old_log_probs: [B, T].
        advantages: [B, T].
        response_mask: [B, T] bool.
        agg_mode: see `losses.aggregate_loss`.
        rollout_weights: [B, T] factors on the per-token loss, or None.
        cov_ratio: see `choose_for_kl_cov`.
        kl_coef: weight of the penalty, not negative.
        chosen: [B, T] bool, the tokens that pay the penalty; None to choose them among these rows.
        **extra: aggregation counts, see `rlvla.algorithms.policy_losses`.

    Returns:
        Scalar loss and metrics; `pg_clipfrac` is the share of valid tokens that paid, `ppo_kl` the mean |log-ratio|.

    Raises:
        ValueError: shapes differ, mask not bool, a number out of range, or see `losses.aggregate_loss`.
    """
    check_number("kl_coef", kl_coef, low=0.0)
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    if chosen is None:
        chosen = choose_for_kl_cov(log_probs, old_log_probs, advantages, response_mask, cov_ratio=cov_ratio)
    check_same_shape(chosen, "chosen", response_mask=response_mask)
    loss = -inputs.advantages * inputs.log_ratio.exp()
    loss = torch.where(chosen, loss + kl_coef * inputs.log_ratio.abs(), loss)
    metrics = inputs.metrics(-inputs.log_ratio.abs(), chosen)
    return inputs.aggregate(loss, agg_mode, extra), metrics


def choose_for_kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cov_ratio: float = 2e-4,
    **extra: Any,
) -> Tensor:
    """The tokens that pay in `kl_cov`: those of the highest covariance (A - mean A)(log_prob - mean log_prob).

    Args:
        log_probs: [B, T].
        old_log_probs: [B, T].
        advantages: [B, T].
        response_mask: [B, T] bool.
        cov_ratio: share of the valid tokens (at least 1 token), in (0, 1].
        **extra: what else the loss is told; not read.

    Returns:
        [B, T] bool.

    Raises:
        ValueError: shapes differ, mask not bool, or a number out of range.
    """
    _check_share(cov_ratio)
    inputs = prepare(log_probs.detach(), old_log_probs, advantages, response_mask, None)
    covariance = _covariance(inputs).masked_fill(~inputs.mask, -torch.inf).flatten()
    count = min(_share_count(inputs, cov_ratio), int(count_valid(inputs.mask)))
    return _marked(inputs, covariance.topk(count).indices)


# By the name of a loss that treats some tokens apart: which ones, called with the arguments of the loss.
TOKEN_CHOICES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"clip_cov": choose_for_clip_cov, "kl_cov": choose_for_kl_cov}
)


def _covariance(inputs: PolicyInputs) -> Tensor:
    """[B, T], product of the centred advantages and log-probs."""
    return (inputs.advantages - inputs.mean(inputs.advantages)) * (inputs.log_probs - inputs.mean(inputs.log_probs))


def _marked(inputs: PolicyInputs, places: Tensor) -> Tensor:
    """[B, T] bool: True at these places of the flattened rows."""
    marked = torch.zeros_like(inputs.mask).flatten()
    marked[places] = True
    return marked.view_as(inputs.mask)


def _share_count(inputs: PolicyInputs, share: float) -> int:
    return max(int(share * int(count_valid(inputs.mask))), 1)


def _check_share(cov_ratio: float) -> None:
    if not 0 < cov_ratio <= 1:
        raise ValueError(f"cov_ratio must lie in (0, 1], got {cov_ratio}")

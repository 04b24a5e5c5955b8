"""Losses that treat tokens of high covariance between advantage and log-prob differently, to preserve entropy.

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models". Means and fractions
are computed over the rows of one call. To split an optimizer step into micro-batches, select the tokens of the whole
step first (`select_tokens` of the registration) and pass each call its rows of the selection as `chosen`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.checks import check_number, check_same_shape, count_valid
from rlvla.algorithms.lazy import torch
from rlvla.algorithms.policy_losses.clipped import pessimistic
from rlvla.algorithms.policy_losses.common import ClipOptions, PolicyInputs, check_clip, prepare
from rlvla.algorithms.policy_losses.registry import register_policy_loss
from rlvla.options import Options, arg

if TYPE_CHECKING:
    from torch import Tensor


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
    """Tokens that `clip_cov` drops, [B, T] bool; inputs as in `clip_cov`.

    Candidates are valid tokens that are not clipped and whose covariance (A - mean A)(log_prob - mean log_prob) lies
    strictly between `cov_low` and `cov_high`. Up to `cov_ratio` times the number of valid tokens (at least 1) are drawn
    from them.

    Args:
        cov_ratio: fraction of the valid tokens to drop, in (0, 1].
        cov_low: lower bound of the covariance.
        cov_high: upper bound of the covariance, at least `cov_low`.
        generator: CPU generator for the draw; None uses torch's global generator.
    """
    check_clip(clip_low, clip_high)
    _check_fraction(cov_ratio)
    if not cov_low <= cov_high:
        raise ValueError(f"cov_low must not exceed cov_high, got {cov_low} and {cov_high}")
    inputs = prepare(log_probs.detach(), old_log_probs, advantages, response_mask, None)
    _, clipped = pessimistic(inputs.advantages, inputs.log_ratio.exp(), clip_low, clip_high)
    covariance = _covariance(inputs)
    candidate = inputs.mask & ~clipped & (covariance > cov_low) & (covariance < cov_high)
    indices = candidate.flatten().nonzero().squeeze(-1)
    order = torch.randperm(len(indices), generator=generator).to(indices.device)
    return _token_mask(inputs, indices[order[: _fraction_count(inputs, cov_ratio)]])


_COV_RATIO: dict[str, Any] = {
    "help": "clip_cov, kl_cov: fraction of the tokens of a step that is selected, at least one",
    "above": 0,
    "maximum": 1,
}


@dataclass(frozen=True)
class ClipCovOptions(ClipOptions):
    """Tokens that Clip-Cov drops."""

    cov_ratio: float = arg(2e-4, **_COV_RATIO)
    cov_low: float = arg(1.0, "smallest covariance of a selected token", at_most="cov_high")
    cov_high: float = arg(5.0, "largest covariance of a selected token")


@register_policy_loss("clip_cov", options=ClipCovOptions, needs={"covariances"}, select_tokens=choose_for_clip_cov)
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
    """Clipped surrogate that drops a random subset of the tokens of high covariance (Clip-Cov).

    No dual clipping; the log-ratio is not clamped.

    Args:
        cov_ratio, cov_low, cov_high, generator: see `choose_for_clip_cov`.
        chosen: [B, T] bool, tokens to drop; None selects them from these rows.

    Returns:
        Loss and metrics; `pg_clipfrac` is the fraction of valid tokens that were dropped.
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


def choose_for_kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cov_ratio: float = 2e-4,
    **extra: Any,
) -> Tensor:
    """Tokens that `kl_cov` penalizes, [B, T] bool: the highest (A - mean A)(log_prob - mean log_prob).

    Args:
        cov_ratio: fraction of the valid tokens to select (at least 1 token), in (0, 1].
    """
    _check_fraction(cov_ratio)
    inputs = prepare(log_probs.detach(), old_log_probs, advantages, response_mask, None)
    covariance = _covariance(inputs).masked_fill(~inputs.mask, -torch.inf).flatten()
    count = min(_fraction_count(inputs, cov_ratio), int(count_valid(inputs.mask)))
    return _token_mask(inputs, covariance.topk(count).indices)


@dataclass(frozen=True)
class KLCovOptions(Options):
    """Tokens that KL-Cov penalizes, and their penalty."""

    cov_ratio: float = arg(2e-4, **_COV_RATIO)
    kl_cov_coef: float = arg(1.0, "weight of the penalty |log-ratio|", minimum=0, argument="kl_coef")


@register_policy_loss("kl_cov", options=KLCovOptions, needs={"covariances"}, select_tokens=choose_for_kl_cov)
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
    """-A rho plus kl_coef |log-ratio| on the valid tokens of highest covariance (KL-Cov). No clipping.

    Args:
        cov_ratio: see `choose_for_kl_cov`.
        kl_coef: weight of the penalty, not negative.
        chosen: [B, T] bool, tokens to penalize; None selects them from these rows.

    Returns:
        Loss and metrics; `pg_clipfrac` is the fraction of valid tokens that were penalized, `ppo_kl` the mean
        |log-ratio|.
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


def _covariance(inputs: PolicyInputs) -> Tensor:
    """[B, T], product of the centered advantages and log-probs."""
    return (inputs.advantages - inputs.mean(inputs.advantages)) * (inputs.log_probs - inputs.mean(inputs.log_probs))


def _token_mask(inputs: PolicyInputs, indices: Tensor) -> Tensor:
    """[B, T] bool, True at these indices of the flattened rows."""
    selected = torch.zeros_like(inputs.mask).flatten()
    selected[indices] = True
    return selected.view_as(inputs.mask)


def _fraction_count(inputs: PolicyInputs, fraction: float) -> int:
    return max(int(fraction * int(count_valid(inputs.mask))), 1)


def _check_fraction(cov_ratio: float) -> None:
    if not 0 < cov_ratio <= 1:
        raise ValueError(f"cov_ratio must lie in (0, 1], got {cov_ratio}")

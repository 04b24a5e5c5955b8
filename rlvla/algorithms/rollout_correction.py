"""Correction for the mismatch between the rollout policy and the training policy.

Different kernels, precision and caches make log-probs at sampling time differ from those recomputed for training.
Importance weights correct for the mismatch, rejection masks drop outliers, and metrics measure it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_matrix, check_same_shape, clean, working_dtype
from rlvla.algorithms.choices import CORRECTION_LEVELS, CORRECTION_MODES, REJECTION_STATISTICS
from rlvla.algorithms.masking import EPSILON, all_reduce_sum, masked_mean

_LOG_RATIO_BOUND = 20.0


@torch.no_grad()
def rollout_correction_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    level: str = "token",
    mode: str = "tis",
    low: float = 0.0,
    high: float = 2.0,
    batch_normalize: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Bounded importance weights exp(old_log_probs - rollout_log_probs).

    Modes: `tis` (truncated importance sampling) clamps weights to [low, high]; `icepop` zeroes weights outside the
    bounds; `seq_mask_tis` keeps token weights but zeroes rows whose geometric-mean weight is outside the bounds.
    Log-ratios are clamped to +-20 first.

    Args:
        old_log_probs: [B, T], recomputed by the training policy.
        rollout_log_probs: [B, T], recorded while sampling.
        response_mask: [B, T] bool.
        level: "token", or "sequence" for the product over a row's valid tokens.
        mode: one of `CORRECTION_MODES`; `seq_mask_tis` requires token level.
        low: lower bound of the weights, not negative.
        high: upper bound of the weights, at least `low`.
        batch_normalize: divide by the mean weight (over valid tokens, or at sequence level over rows with a valid
            token), so that the correction does not change the effective step size.
        process_group: the mean is taken over all ranks, see `masking.all_reduce_sum`.

    Returns:
        weights: [B, T], 0 outside the mask.
        metrics: `weight_metrics`, plus `rollout_is_batch_norm_factor` with `batch_normalize`.

    Raises:
        ValueError: unknown level or mode, bounds out of order, shapes differ, mask not bool.
    """
    _check_choice("level", level, CORRECTION_LEVELS)
    _check_choice("mode", mode, CORRECTION_MODES)
    _check_bounds(low, high)
    if (mode, level) == ("seq_mask_tis", "sequence"):
        raise ValueError("mode 'seq_mask_tis' weighs tokens and masks rows; use level='token'")
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, response_mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    raw = clean(log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp(), response_mask, log_ratio.dtype)
    if mode == "tis":
        weights = clean(raw.clamp(low, high), response_mask, raw.dtype)
    elif mode == "icepop":
        weights = torch.where((raw >= low) & (raw <= high), raw, torch.zeros_like(raw))
    else:
        row_ratio = masked_mean(log_ratio, response_mask, dim=-1).exp().unsqueeze(-1)
        weights = torch.where((row_ratio >= low) & (row_ratio <= high), raw, torch.zeros_like(raw))
    metrics = weight_metrics(raw, weights, response_mask, low, high)
    if batch_normalize:
        if level == "token":
            mean = masked_mean(weights, response_mask, process_group=process_group)
        else:
            total = all_reduce_sum(masked_mean(weights, response_mask, dim=-1).sum(), process_group)
            mean = total / all_reduce_sum(response_mask.any(-1).sum(), process_group).clamp(min=1)
        factor = torch.where(mean > EPSILON, mean, torch.ones_like(mean))  # 1 if all weights are 0
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def interpolated_log_probs(behaviour: Tensor, current: Tensor, staleness: Tensor) -> Tensor:
    """Log-probs of a policy between the one that decided and the one in training (decoupled PPO, Fu et al. 2025).

    behaviour + alpha (current - behaviour) with alpha = s / (s + 1): the policy before an update lies s of s + 1
    versions on the way from the one that decided to the one after the update.

    Args:
        behaviour: [B, T], recorded while sampling.
        current: [B, T], of the policy in training; no gradient flows through it.
        staleness: [B], s, versions between the policy that decided and the one before the update; 0: they are the same.

    Returns:
        [B, T]; `behaviour` where s is 0.

    Raises:
        ValueError: shapes differ.
    """
    if behaviour.shape != current.shape or staleness.shape != behaviour.shape[:1]:
        shapes = [tuple(x.shape) for x in (behaviour, current, staleness)]
        raise ValueError(f"shapes of behaviour, current and staleness do not fit: {shapes}")
    alpha = (staleness / (staleness + 1)).to(behaviour.dtype)[:, None]
    return torch.where(alpha > 0, behaviour + alpha * (current.detach() - behaviour), behaviour)


@torch.no_grad()
def rejection_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    statistic: str = "k3",
    level: str = "sequence",
    high: float,
    low: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The response mask without tokens or rows whose divergence is out of bounds.

    With d = old_log_probs - rollout_log_probs, clamped to +-20, the statistic of a token is |d| (k1), d^2 / 2 (k2) or
    exp(d) - d - 1 (k3). The statistic of a row is the mean over its valid tokens (|mean d| for k1). Values in
    [low, high] are kept.

    Args:
        old_log_probs: [B, T], recomputed by the training policy.
        rollout_log_probs: [B, T], recorded while sampling.
        response_mask: [B, T] bool.
        statistic: one of `REJECTION_STATISTICS`.
        level: "token" or "sequence".
        high: largest statistic to keep.
        low: smallest statistic to keep, not negative.

    Returns:
        mask: [B, T] bool, a subset of `response_mask`.
        metrics: `rollout_rs_mean` and `rollout_rs_max` of the statistic, `rollout_rs_masked_fraction` of valid tokens,
            `rollout_rs_seq_masked_fraction` of non-empty rows that lost a token.

    Raises:
        ValueError: unknown statistic or level, bounds out of order, shapes differ, mask not bool.
    """
    _check_choice("statistic", statistic, REJECTION_STATISTICS)
    _check_choice("level", level, CORRECTION_LEVELS)
    _check_bounds(low, high)
    bounded = _log_ratio(old_log_probs, rollout_log_probs, response_mask).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    if statistic == "k1":
        value = bounded
    else:
        value = 0.5 * bounded.square() if statistic == "k2" else torch.expm1(bounded) - bounded
    if level == "sequence":
        value = masked_mean(value, response_mask, dim=-1).unsqueeze(-1).expand_as(bounded)
    value = value.abs()
    kept = response_mask & (value >= low) & (value <= high)
    rows = response_mask.any(-1)
    lost = (response_mask & ~kept).any(-1)
    metrics = {
        "rollout_rs_mean": masked_mean(value, response_mask),
        "rollout_rs_max": clean(value, response_mask, value.dtype).amax() if value.numel() else value.sum(),
        "rollout_rs_masked_fraction": masked_mean((~kept).to(value.dtype), response_mask),
        "rollout_rs_seq_masked_fraction": masked_mean(lost.to(value.dtype), rows),
    }
    return kept, metrics


@torch.no_grad()
def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Divergence between the rollout policy and the training policy.

    Args:
        old_log_probs: [B, T], recomputed by the training policy.
        rollout_log_probs: [B, T], recorded while sampling.
        response_mask: [B, T] bool.

    Returns:
        `probs_diff_mean` and `probs_diff_max` of |probability difference|, `kl` (KL(rollout || training), the mean of
        rollout - old), `k3_kl` (its low-variance estimate), `ess` (effective sample size of the unbounded token
        weights, as a fraction of the valid tokens; 1 if the policies agree).

    Raises:
        ValueError: shapes differ or mask not bool.
    """
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, response_mask)
    dtype = log_ratio.dtype
    old, rollout = (
        clean(old_log_probs, response_mask, dtype).exp(),
        clean(rollout_log_probs, response_mask, dtype).exp(),
    )
    difference = (old - rollout).abs()
    bounded = log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return {
        "probs_diff_mean": masked_mean(difference, response_mask),
        "probs_diff_max": difference.amax() if difference.numel() else difference.sum(),
        "kl": masked_mean(-log_ratio, response_mask),
        "k3_kl": masked_mean(torch.expm1(bounded) - bounded, response_mask),
        "ess": _effective_sample_fraction(bounded.exp(), response_mask),
    }


def weight_metrics(raw: Tensor, weights: Tensor, mask: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Statistics of the weights over the valid tokens.

    Args:
        raw: [B, T], weights before the bounds are applied.
        weights: [B, T], weights after that.
        mask: [B, T] bool.
        low: lower bound.
        high: upper bound.

    Returns:
        `rollout_is_mean`, `rollout_is_min`, `rollout_is_max` (of the bounded weights), `rollout_is_fraction_low` and
        `rollout_is_fraction_high` (raw weights outside the bounds), `rollout_is_ess` (effective sample size of the
        bounded weights, as a fraction of the valid tokens).
    """
    inf = torch.full((), torch.inf, dtype=weights.dtype, device=weights.device)
    empty = not bool(mask.any())
    zero = weights.new_zeros(())
    return {
        "rollout_is_mean": masked_mean(weights, mask),
        "rollout_is_min": zero if empty else torch.where(mask, weights, inf).amin(),
        "rollout_is_max": zero if empty else torch.where(mask, weights, -inf).amax(),
        "rollout_is_fraction_low": masked_mean((raw < low).to(raw.dtype), mask),
        "rollout_is_fraction_high": masked_mean((raw > high).to(raw.dtype), mask),
        "rollout_is_ess": _effective_sample_fraction(weights, mask),
    }


def _effective_sample_fraction(weights: Tensor, mask: Tensor) -> Tensor:
    """mean(w)^2 / mean(w^2) over the mask; 0 if all weights are 0."""
    square = masked_mean(weights.square(), mask)
    return masked_mean(weights, mask).square() / square.clamp(min=torch.finfo(square.dtype).tiny)


def _log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    check_matrix(mask)
    check_same_shape(mask, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    dtype = working_dtype(old_log_probs, rollout_log_probs)
    return clean(old_log_probs.to(dtype) - rollout_log_probs.to(dtype), mask, dtype)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(choices)}")


def _check_bounds(low: float, high: float) -> None:
    if not 0.0 <= low <= high:
        raise ValueError(f"bounds must satisfy 0 <= low <= high, got low {low} and high {high}")

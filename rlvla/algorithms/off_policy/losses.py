"""Losses of critics, actor and temperatures.

Each is a mean over rows, normalised like `aggregate_loss`: with `num_rows`, the rows of the whole optimizer step over
all ranks, parts of a batch sum to the loss of the batch. Rows outside `mask` ([B] bool, None: all) count nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_mask, check_same_shape, check_shape, clean, working_dtype
from rlvla.algorithms.losses import aggregate_loss
from rlvla.algorithms.off_policy.primitives import over_primitives
from rlvla.algorithms.off_policy.soft_values import soft_value


def critic_loss(
    q_values: Tensor,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    num_rows: float | Tensor | None = None,
    dp_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """Half the squared error, averaged over critics, times the importance weight of the row.

    Weighted errors are divided by the number of rows, not by the sum of weights (Schaul et al. 2016).

    Args:
        q_values: [M, B], with gradient.
        targets: [B], see `soft_target`; the same for all critics.
        weights: [B] of prioritised replay; None: 1.
        mask: [B] bool.
        num_rows: see above.
        dp_size: see `aggregate_loss`.

    Returns:
        Scalar loss, and [B] absolute TD errors averaged over critics, without gradient and weights: the new priorities.

    Raises:
        ValueError: shapes differ, mask not bool, or see `aggregate_loss`.
    """
    check_shape("targets", targets, q_values.shape[1:])
    rows = _rows(targets, mask)
    check_same_shape(rows, "mask", targets=targets, weights=weights)
    dtype = working_dtype(q_values, targets)
    errors = clean(q_values, rows, dtype) - clean(targets.detach(), rows, dtype)
    loss = 0.5 * errors.square().mean(0)
    if weights is not None:
        loss = loss * clean(weights.detach(), rows, dtype)
    return _mean(loss, rows, num_rows, dp_size), errors.detach().abs().mean(0)


def conservative_loss(
    stored: Tensor,
    sampled: Tensor,
    log_densities: Tensor,
    *,
    floors: Tensor,
    mask: Tensor | None = None,
    num_rows: float | Tensor | None = None,
    dp_size: int = 1,
) -> Tensor:
    """Penalty of calibrated conservative Q-learning (Cal-QL, Nakamoto et al. 2023), averaged over critics.

    log mean_i exp(max(Q(s, a_i), floor_i)) / p(a_i) - Q(s, a): with floors of -inf an estimate of CQL's
    log of the integral of exp Q(s, .), less the value of the stored decision (Kumar et al. 2020). Values below their
    floor are not lowered further.

    Args:
        stored: [M, B], values of the stored decisions.
        sampled: [M, B, N], values of N sampled decisions.
        log_densities: [B, N], log p of the sampled decisions.
        floors: [B, N], e.g. recorded returns for the policy's decisions, and -inf for uniform ones.
        mask: [B] bool.
        num_rows: see above.
        dp_size: see `aggregate_loss`.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes differ, mask not bool, or see `aggregate_loss`.
    """
    check_shape("stored", stored, sampled.shape[:2])
    check_shape("log_densities", log_densities, sampled.shape[1:])
    check_shape("floors", floors, sampled.shape[1:])
    rows, dtype = _rows(stored[0], mask), working_dtype(stored, sampled)
    values = torch.maximum(clean(sampled, rows.unsqueeze(-1), dtype), floors.detach().to(dtype))
    soft_maximum = torch.logsumexp(values - log_densities.detach(), -1) - math.log(values.shape[-1])
    return _mean((soft_maximum - clean(stored, rows, dtype)).mean(0), rows, num_rows, dp_size)


def actor_loss(
    q_values: Tensor,
    log_probs: Tensor,
    primitive_log_probs: Tensor | None = None,
    *,
    alpha: float | Tensor,
    alpha_primitives: float | Tensor = 0.0,
    reduction: str = "min",
    mask: Tensor | None = None,
    num_rows: float | Tensor | None = None,
    dp_size: int = 1,
) -> Tensor:
    """Minus the soft value of reparameterised actions; with primitives the exact expectation over their choice.

    sum_k pi_k [alpha_primitives log pi_k + alpha log pi(x_k) - Q(s, k, x_k)], or alpha log pi(x) - Q(s, x) without
    primitives. The critics must be frozen, or they receive a gradient too.

    Args:
        q_values: [M, B, n] at one sample x_k for every primitive; [M, B] without primitives.
        log_probs: [B, n] or [B] of these samples, summed over parameters.
        primitive_log_probs: [B, n], all log pi(k | s); None without primitives.
        alpha: see `soft_value`.
        alpha_primitives: see `soft_value`.
        reduction: see `reduce_critics`.
        mask: [B] bool.
        num_rows: see above.
        dp_size: see `aggregate_loss`.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes that do not fit, mask not bool, unknown reduction, or see `aggregate_loss`.
    """
    primitives = primitive_log_probs is not None
    if q_values.dim() != 2 + primitives:
        expected = "[M, B, n] with primitives" if primitives else "[M, B] without primitives"
        raise ValueError(f"q_values has shape {list(q_values.shape)}; it must be {expected}")
    rows = _rows(q_values[0, :, 0] if primitives else q_values[0], mask)
    entries = rows.unsqueeze(-1) if primitives else rows
    dtype = working_dtype(q_values, log_probs, primitive_log_probs)
    q_values, log_probs = clean(q_values, entries, dtype), clean(log_probs, entries, dtype)
    if primitive_log_probs is not None:
        primitive_log_probs = clean(primitive_log_probs, entries, dtype)
    value = soft_value(
        q_values, log_probs, primitive_log_probs, alpha=alpha, alpha_primitives=alpha_primitives, reduction=reduction
    )
    if primitive_log_probs is not None:
        value = over_primitives(primitive_log_probs, value)
    return -_mean(value, rows, num_rows, dp_size)


def imitation_loss(
    losses: Tensor,
    weights: Tensor,
    *,
    mask: Tensor | None = None,
    num_rows: float | Tensor | None = None,
    dp_size: int = 1,
) -> Tensor:
    """Mean over all rows of the loss of imitating the stored decision, times the weight of the row.

    Args:
        losses: [B], e.g. of flow matching.
        weights: [B], without gradient; 0 for rows that are not imitated.
        mask: [B] bool.
        num_rows: see above.
        dp_size: see `aggregate_loss`.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes differ, mask not bool, or see `aggregate_loss`.
    """
    check_shape("weights", weights, losses.shape)
    rows, dtype = _rows(losses, mask), working_dtype(losses)
    return _mean(clean(losses, rows, dtype) * clean(weights.detach(), rows, dtype), rows, num_rows, dp_size)


def temperature_loss(
    log_alpha: Tensor,
    entropies: Tensor,
    target_entropy: float | Tensor,
    *,
    mask: Tensor | None = None,
    num_rows: float | Tensor | None = None,
    dp_size: int = 1,
) -> Tensor:
    """Mean of log alpha (entropy - target): gradient descent raises alpha if the entropy is below its target.

    The factor is log alpha and not alpha, so that the gradient does not vanish with alpha.

    Args:
        log_alpha: scalar, with gradient.
        entropies: [B]: of the choice of primitive, `over_primitives(p, -p)`; of the parameters, minus their log-probs,
            with primitives `over_primitives(p, -log_probs)`, where p is log pi(k | s). No gradient reaches them.
        target_entropy: a number, or [B].
        mask: [B] bool.
        num_rows: see above.
        dp_size: see `aggregate_loss`.

    Returns:
        Scalar.

    Raises:
        ValueError: log_alpha not a scalar, shapes differ, mask not bool, or see `aggregate_loss`.
    """
    check_shape("log_alpha", log_alpha, ())
    rows = _rows(entropies, mask)
    if isinstance(target_entropy, Tensor) and target_entropy.dim():
        check_shape("target_entropy", target_entropy, entropies.shape)
    gap = (entropies - target_entropy).detach()
    return log_alpha * _mean(gap, rows, num_rows, dp_size)


def primitive_target_entropy(n_primitives: int, share: float = 0.5) -> float:
    """Target for the choice among n primitives: a share of the largest entropy, log n."""
    return share * math.log(n_primitives)


def parameter_target_entropy(mask: Tensor, share: float = 1.0) -> Tensor:
    """Target for the parameters of each primitive: minus the number in use, times `share`.

    Args:
        mask: [n, D] bool, see `parameter_mask`; its expectation `over_primitives` is the target of a row.
        share: 1 in SAC, 0.5 in RLPD and DSRL.

    Returns:
        [n] float32.
    """
    return -share * mask.sum(-1).float()


def _rows(like: Tensor, mask: Tensor | None) -> Tensor:
    """The mask [B], by default all rows of `like` [B]."""
    if like.dim() != 1:
        raise ValueError(f"expected one number per row, got shape {list(like.shape)}")
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    check_mask(mask, "mask")
    check_shape("mask", mask, like.shape)
    return mask


def _mean(values: Tensor, rows: Tensor, num_rows: float | Tensor | None, dp_size: int) -> Tensor:
    return aggregate_loss(
        values.unsqueeze(-1), rows.unsqueeze(-1), "seq-mean-token-sum", num_sequences=num_rows, dp_size=dp_size
    )

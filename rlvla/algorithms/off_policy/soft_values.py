"""Values with an entropy term, from an ensemble of critics, and the targets of the critics."""

from __future__ import annotations

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_shape, working_dtype
from rlvla.algorithms.choices import CRITIC_REDUCTIONS


def random_critics(n_critics: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Indices [size] of different critics, all subsets equally likely (REDQ, Chen et al. 2021; RLPD, Ball et al. 2023).

    Targets are the minimum over a small subset, drawn once per update. Evaluate only these critics.

    Raises:
        ValueError: size outside 1..n_critics.
    """
    if not 1 <= size <= n_critics:
        raise ValueError(f"a subset of {size} out of {n_critics} critics is not possible; it needs 1..{n_critics}")
    device = "cpu" if generator is None else generator.device
    return torch.randperm(n_critics, generator=generator, device=device)[:size]


def reduce_critics(q_values: Tensor, reduction: str = "min") -> Tensor:
    """Values [M, ...] of an ensemble as one, [...].

    Args:
        q_values: [M, ...].
        reduction: "min" (pessimistic: targets; the actor in SAC) or "mean" (the actor in RLPD).

    Raises:
        ValueError: unknown reduction.
    """
    if reduction not in CRITIC_REDUCTIONS:
        raise ValueError(f"unknown reduction of critics {reduction!r}; known: {', '.join(CRITIC_REDUCTIONS)}")
    return q_values.amin(0) if reduction == "min" else q_values.mean(0)


def soft_value(
    q_values: Tensor,
    log_probs: Tensor,
    primitive_log_probs: Tensor | None = None,
    *,
    alpha: float | Tensor,
    alpha_primitives: float | Tensor = 0.0,
    reduction: str = "min",
) -> Tensor:
    """Q(s, k, x) - alpha_primitives log pi(k | s) - alpha log pi(x | s, k), with Q reduced over the critics.

    A target without entropy needs `reduce_critics` only.

    Args:
        q_values: [M, ...]: [M, B] for one action per row, [M, B, n] for all primitives.
        log_probs: [...] of the whole action or all parameters, summed over their dimensions.
        primitive_log_probs: [...], None without primitives.
        alpha: temperature of the parameters; no gradient reaches it.
        alpha_primitives: temperature of the choice of primitive; no gradient reaches it.
        reduction: see `reduce_critics`.

    Returns:
        [...].

    Raises:
        ValueError: shapes differ, or see `reduce_critics`.
    """
    check_shape("log_probs", log_probs, q_values.shape[1:])
    value = reduce_critics(q_values, reduction) - _constant(alpha) * log_probs
    if primitive_log_probs is None:
        return value
    check_shape("primitive_log_probs", primitive_log_probs, q_values.shape[1:])
    return value - _constant(alpha_primitives) * primitive_log_probs


def soft_target(returns: Tensor, discounts: Tensor, next_values: Tensor) -> Tensor:
    """Targets of the critics: returns + discounts * next_values, without gradient.

    Args:
        returns: [B], discounted rewards of n steps.
        discounts: [B], gamma^n, and 0 where the episode terminated. A truncated row bootstraps like any other.
        next_values: [B] of the observation after these steps; ignored where the discount is 0, even if NaN.

    Returns:
        [B]; float64 if an input is, float32 otherwise.

    Raises:
        ValueError: shapes differ.
    """
    check_shape("discounts", discounts, returns.shape)
    check_shape("next_values", next_values, returns.shape)
    dtype = working_dtype(returns, discounts, next_values)
    returns, discounts, next_values = (x.detach().to(dtype) for x in (returns, discounts, next_values))
    return returns + discounts * next_values.masked_fill(discounts == 0, 0.0)


def _constant(number: float | Tensor) -> float | Tensor:
    return number.detach() if isinstance(number, Tensor) else number

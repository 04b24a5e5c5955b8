"""KL divergence to the reference policy and controllers of its coefficient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_mask, check_number, clean, working_dtype
from rlvla.algorithms.choices import KL_KINDS

_K3_LOG_RATIO_BOUND = 20.0  # keeps exp finite in float32
_K3_VALUE_BOUND = 10.0
ADAPTIVE_ERROR_BOUND = 0.2  # of the relative error that adapts the weight


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str, mask: Tensor | None = None) -> Tensor:
    """Per-token estimate of KL(policy || reference).

    Kinds (Schulman, "Approximating KL divergence", 2020), with d = log_probs - ref_log_probs: `k1` or `kl`: d;
    `abs`: |d|; `k2` or `mse`: d^2 / 2; `k3` or `low_var_kl`: exp(-d) + d - 1, at most 10, with the gradient of the
    unclamped estimate (straight-through), bounded by exp(20) - 1; `full`: the exact divergence, from logits. With the
    suffix `+` the value is that of the kind, but the gradient is that of k2, which is unbiased.

    Args:
        log_probs: [B, T] log-probs of the sampled tokens; for `full`, [B, T, V] logits.
        ref_log_probs: log-probs (logits) of the reference policy, same shape.
        kind: one of `KL_KINDS`, optionally followed by `+` (not `full`).
        mask: [B, T] bool; the result is 0 outside the mask, and NaN in the padding affects neither value nor gradient.

    Returns:
        [B, T].

    Raises:
        ValueError: unknown kind, shapes differ, mask not bool, or `full` without a vocabulary dimension.
    """
    base = kind.removesuffix("+")
    if base not in KL_KINDS:
        raise ValueError(
            f"unknown KL kind {kind!r}; known: {', '.join(KL_KINDS)}, each but full also with the suffix +"
        )
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(
            f"log_probs has shape {list(log_probs.shape)} but ref_log_probs has shape {list(ref_log_probs.shape)}"
        )
    dtype = working_dtype(log_probs, ref_log_probs)
    log_probs, ref_log_probs = log_probs.to(dtype), ref_log_probs.to(dtype)
    if mask is not None:
        check_mask(mask)
        if mask.shape != log_probs.shape[: mask.dim()]:
            raise ValueError(f"log_probs has shape {list(log_probs.shape)} but mask has shape {list(mask.shape)}")
        entries = mask.unsqueeze(-1) if base == "full" else mask
        log_probs, ref_log_probs = clean(log_probs, entries, dtype), clean(ref_log_probs, entries, dtype)
    if base == "full":
        if kind.endswith("+"):
            raise ValueError("KL kind 'full+' does not exist: the gradient of the exact KL is exact; use 'full'")
        return _exact_kl(log_probs, ref_log_probs)
    value = _estimate(log_probs, ref_log_probs, base)
    if kind.endswith("+"):
        surrogate = _estimate(log_probs, ref_log_probs, "k2")
        return value.detach() + (surrogate - surrogate.detach())
    return value


def _estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    difference = log_probs - ref_log_probs
    if kind in ("k1", "kl"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("k2", "mse"):
        return 0.5 * difference.square()
    return _k3(-difference)


def _k3(inverse: Tensor) -> Tensor:
    """exp(x) - 1 - x, clamped; a token beyond the clamp keeps a gradient, which pulls it back."""
    bounded = inverse.clamp(-_K3_LOG_RATIO_BOUND, _K3_LOG_RATIO_BOUND)
    slope = torch.expm1(bounded)  # exp(x) - 1 would cancel near x = 0, where this estimator operates
    value = (slope - bounded).clamp(max=_K3_VALUE_BOUND)
    finite = inverse.nan_to_num()  # a log-prob of -inf has no gradient
    straight_through = value.detach() + slope.detach() * (finite - finite.detach())
    return torch.where(value < _K3_VALUE_BOUND, value, straight_through)


def _exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    if logits.dim() < 2:
        raise ValueError(f"KL kind 'full' needs logits of shape [B, T, vocabulary], got {list(logits.shape)}")
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    terms = log_p.exp() * (log_p - log_q)
    return torch.where(torch.isneginf(log_p), torch.zeros_like(terms), terms).sum(-1)


class FixedKLController:
    """A constant KL coefficient.

    Args:
        init_kl_coef: the coefficient, not negative.

    Raises:
        ValueError: negative or NaN coefficient.
    """

    def __init__(self, init_kl_coef: float):
        check_number("init_kl_coef", init_kl_coef, low=0.0)
        self.value = float(init_kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """No-op; same signature as `AdaptiveKLController.update`."""

    def state_dict(self) -> dict[str, float]:
        """State to be saved in a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`."""
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """Adapts the coefficient so that the measured KL approaches a target (Ziegler et al. 2019).

    Args:
        init_kl_coef: initial coefficient, not negative.
        target: target KL, positive.
        horizon: steps over which a constant relative error of 20 % changes the coefficient by 20 %.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        super().__init__(init_kl_coef)
        if not target > 0 or not horizon > 0:
            raise ValueError(f"target and horizon must be positive, got {target} and {horizon}")
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Value *= 1 + clip(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon.

        Args:
            current_kl: KL measured over the last iteration; NaN is ignored.
            n_steps: steps (samples) of that iteration.
        """
        if math.isnan(current_kl):
            return
        error = min(max(float(current_kl) / self.target - 1.0, -ADAPTIVE_ERROR_BOUND), ADAPTIVE_ERROR_BOUND)
        self.value *= 1.0 + error * n_steps / self.horizon

"""Objectives of flow-matching policies: DPPO, FPO and NFT."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_mask, check_number
from rlvla.algorithms.flow.matching import mean_square
from rlvla.algorithms.flow.steps import number_like, step_distribution

_CLIP_GROWTH = 3.0
# A log-ratio beyond this has no finite exponential in float32 worth computing.
_LOG_RATIO_BOUND = 20.0


def denoising_discount(steps: int, gamma: float = 0.99) -> Tensor:
    """Discount of the advantage at each denoising step, gamma^(K - i - 1): earlier, noisier steps get less (DPPO).

    Args:
        steps: K.
        gamma: in [0, 1].

    Returns:
        [K] float32; the last is 1.

    Raises:
        ValueError: no steps, or gamma out of range.
    """
    check_number("steps", steps, low=1)
    check_number("gamma", gamma, low=0.0, high=1.0)
    return gamma ** torch.arange(steps - 1, -1, -1, dtype=torch.float32)


def denoising_clip(steps: int, *, base: float = 0.001, top: float = 0.01) -> Tensor:
    """Clip width at each denoising step, growing exponentially from `base` to `top` (DPPO).

    base + (top - base) (exp(3 i / (K - 1)) - 1) / (exp(3) - 1); a single step gets `top`.

    Args:
        steps: K.
        base: width at the first step.
        top: width at the last step.

    Returns:
        [K] float32.

    Raises:
        ValueError: no steps, or not 0 <= base <= top.
    """
    check_number("steps", steps, low=1)
    check_number("base", base, low=0.0, high=top)
    share = torch.linspace(0.0, 1.0, steps) if steps > 1 else torch.ones(1)
    return base + (top - base) * torch.expm1(_CLIP_GROWTH * share) / math.expm1(_CLIP_GROWTH)


def dppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    gamma: float = 0.99,
    clip: Tensor | None = None,
    clamp: tuple[float, float] | None = (-5.0, 2.0),
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate with a probability ratio for each denoising step (DPPO, Ren et al. 2024).

    With log-probs summed over the chunk: max(-A_i rho_i, -A_i clip(rho_i, 1 - c_i, 1 + c_i)), A_i the advantage times
    `denoising_discount`, c_i from `denoising_clip`.

    Args:
        log_probs: [B, K, A, D] of the steps, with gradient.
        old_log_probs: same shape, before the update.
        advantages: [B].
        mask: [B or 1, A, D] bool, elements that count; None: all.
        gamma: see `denoising_discount`.
        clip: [K] widths; None for `denoising_clip`, infinity for no clipping.
        clamp: bounds of the log-prob of each element, applied to both sides; no gradient flows beyond them. None: no
            clamping.

    Returns:
        The loss [B, K] of each step, and where it was clipped, [B, K] bool.

    Raises:
        ValueError: shapes that do not fit, bounds in the wrong order, or a number out of range.
    """
    if log_probs.dim() != 4 or log_probs.shape != old_log_probs.shape:
        raise ValueError(
            f"log_probs and old_log_probs must have the same shape [B, K, A, D], got {list(log_probs.shape)} and "
            f"{list(old_log_probs.shape)}"
        )
    rows, steps = log_probs.shape[:2]
    clip = denoising_clip(steps) if clip is None else clip
    if advantages.shape != (rows,) or clip.shape != (steps,):
        raise ValueError(
            f"advantages and clip must have shapes [{rows}] and [{steps}], got {list(advantages.shape)} and "
            f"{list(clip.shape)}"
        )
    if clamp is not None:
        check_number("the lower bound of clamp", clamp[0], high=clamp[1])
        log_probs, old_log_probs = log_probs.clamp(*clamp), old_log_probs.clamp(*clamp)
    difference = log_probs - old_log_probs.detach()
    if mask is not None:
        check_mask(mask, "mask")
        if mask.shape[1:] != log_probs.shape[2:] or mask.shape[0] not in (1, rows):
            raise ValueError(
                f"mask has shape {list(mask.shape)}, expected [{rows} or 1, {log_probs.shape[2]}, {log_probs.shape[3]}]"
            )
        difference = torch.where(mask.unsqueeze(1), difference, torch.zeros_like(difference))
    ratio = difference.sum((-2, -1)).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
    weighted = advantages.detach().unsqueeze(1).to(ratio) * denoising_discount(steps, gamma).to(ratio)
    width = clip.to(ratio)
    plain, clipped = -weighted * ratio, -weighted * torch.minimum(torch.maximum(ratio, 1.0 - width), 1.0 + width)
    return torch.maximum(plain, clipped), (clipped > plain).detach()


def fpo_log_ratio(loss_old: Tensor, loss_new: Tensor) -> Tensor:
    """Logarithm of FPO's stand-in for the probability ratio: mean old loss - mean new loss over the pairs.

    A surrogate, not a density ratio: flow-matching losses bound the log-density only when weighted over time.

    Args:
        loss_old: [B, n] flow-matching losses of n (noise, time) pairs when the action was sampled, see `cfm_loss`.
        loss_new: [B, n] losses of the same pairs now, with gradient.

    Returns:
        [B].

    Raises:
        ValueError: shapes that differ or are not [B, n].
    """
    if loss_old.dim() != 2 or loss_old.shape[1] < 1 or loss_old.shape != loss_new.shape:
        raise ValueError(
            f"loss_old and loss_new must have the same shape [B, n], got {list(loss_old.shape)} and "
            f"{list(loss_new.shape)}"
        )
    # The mean of the differences is exactly 0 at unchanged losses, whatever the order of summation.
    return (loss_old.detach() - loss_new).mean(-1)


def nft_reward(advantages: Tensor, clip: float = 1.0) -> Tensor:
    """Advantages as rewards in [0, 1] for `nft_loss`: clip(A, -c, c) / (2 c) + 1/2.

    Raises:
        ValueError: `clip` is not positive.
    """
    if not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    return advantages.clamp(-clip, clip) / (2.0 * clip) + 0.5


def nft_loss(
    v: Tensor,
    v_old: Tensor,
    x: Tensor,
    x_next: Tensor,
    t: float | Tensor,
    d: float | Tensor,
    reward: float | Tensor,
    *,
    beta: float = 1.0,
    method: str = "sde",
    noise_level: float | Tensor = 0.5,
    next_t: float | Tensor | None = None,
    std: float | Tensor | None = None,
    std_floor: float = 0.0,
    mask: Tensor | None = None,
    weight: float | Tensor = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Regression of a step's mean on its sample, with a mirrored velocity for failures (pi-StepNFT).

    With v+ = v_old + beta (v - v_old) and v- = v_old - beta (v - v_old), the loss is r E+ + (1 - r) E-, where E+ and E-
    are the weighted mean squared errors of the step's mean under v+ and v- against x_next. At v = v_old its gradient is
    (2 r - 1) beta times that of the squared error of v; with `weight` 1 / std^2 it is that of
    -(2 r - 1) beta log p(x_next), times 2 / (A D).

    Args:
        v: [..., A, D] velocity of the trained policy at (x, t), with gradient.
        v_old: velocity of the policy that sampled.
        x: start of the step.
        x_next: its sample.
        t: see `step_distribution`.
        d: see `step_distribution`.
        reward: r in [0, 1]: success, or `nft_reward` of an advantage; a number or with the dimensions [...].
        beta: scale of the mirrored difference, positive.
        method: see `step_distribution`.
        noise_level: see `step_distribution`.
        next_t: see `step_distribution`.
        std: see `step_distribution`.
        std_floor: see `step_distribution`.
        mask: bool, broadcastable to x: elements that carried noise and were executed. None: all.
        weight: factor of the squared errors, not negative, broadcastable to x.
        reduction: "mean", or "none" for the loss of each step [...].

    Returns:
        A scalar, or [...].

    Raises:
        ValueError: shapes that do not fit, or a number out of range (tensors are checked on the CPU).
    """
    for name, tensor in (("v_old", v_old), ("x", x), ("x_next", x_next)):
        if tensor.shape != v.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)} but v has shape {list(v.shape)}")
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be mean or none, got {reduction!r}")
    if mask is not None:
        check_mask(mask, "mask")
    v_old = v_old.detach()
    change = beta * (v - v_old)

    def error(velocity: Tensor) -> Tensor:
        mean, _ = step_distribution(
            x, velocity, t, d, method=method, noise_level=noise_level, next_t=next_t, std=std, std_floor=std_floor
        )
        return mean_square(number_like(mean, "weight", weight).sqrt() * (mean - x_next.to(mean)), mask)

    positive, negative = error(v_old + change), error(v_old - change)
    if isinstance(reward, Tensor) and reward.shape[positive.dim() :] == (1, 1):
        reward = reward[..., 0, 0]
    if isinstance(reward, Tensor) and reward.dim() not in (0, positive.dim()):
        # Broadcasting would pair rewards [B] with the last dimension of [B, R].
        raise ValueError(f"reward has shape {list(reward.shape)}, expected {list(positive.shape)} or a number")
    r = number_like(positive, "reward", reward, high=1.0)
    loss = r * positive + (1.0 - r) * negative
    return loss.mean() if reduction == "mean" else loss


def mirrored_terms(mean: Tensor, mean_old: Tensor, x_next: Tensor, std: Tensor) -> dict[str, Tensor]:
    """Element-wise terms of `nft_loss` with weights 1 / std^2, see `mirrored_loss`.

    With u = (mean - mean_old) / std and z = (x_next - mean_old) / std: `shift` u^2, twice the KL from the old step to
    the new one; `agreement` u z; `residual` z^2.

    Args:
        mean: of the step under the trained policy, with gradient.
        mean_old: same shape, under the policy that sampled.
        x_next: same shape, the sample of the step.
        std: same shape; elements where it is 0 contribute 0 and get no gradient.

    Returns:
        Each in the shape of `mean`.
    """
    random = std > 0
    safe = torch.where(random, std, torch.ones_like(std))

    def scaled(difference: Tensor) -> Tensor:
        return torch.where(random, difference, torch.zeros_like(difference)) / safe

    u, z = scaled(mean - mean_old.detach()), scaled(x_next.detach() - mean_old.detach())
    return {"shift": u.square(), "agreement": u * z, "residual": z.square()}


def mirrored_loss(terms: Mapping[str, Tensor], reward: Tensor, mask: Tensor, *, beta: float = 1.0) -> Tensor:
    """`nft_loss` of each row: beta^2 shift - 2 beta (2 r - 1) agreement + residual, averaged over its valid columns.

    r E+ + (1 - r) E- for errors that are affine in the velocity, as the mean of every step is.

    Args:
        terms: `mirrored_terms`, each [B, L].
        reward: [B], r in [0, 1].
        mask: [B, L] bool.
        beta: scale of the mirrored difference, positive.

    Returns:
        [B]; 0 for rows without a valid column.

    Raises:
        ValueError: `beta` is not positive, or the mask is not bool.
    """
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    check_mask(mask, "mask")
    sign = (2.0 * reward - 1.0).unsqueeze(-1)
    loss = beta**2 * terms["shift"] - 2.0 * beta * sign * terms["agreement"] + terms["residual"]
    return torch.where(mask, loss, torch.zeros_like(loss)).sum(-1) / mask.sum(-1).clamp(min=1)

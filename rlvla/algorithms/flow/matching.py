"""Flow matching: times, interpolation, targets and the regression loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_broadcast, check_mask, working_dtype

_TIME_SHAPE = 1.5
_TIME_SCALE, _TIME_OFFSET = 0.999, 0.001


def flow_matching_time(uniforms: Tensor) -> Tensor:
    """Training times 0.999 s + 0.001 with s ~ Beta(1.5, 1), by inverse CDF: s = uniform^(2/3) (pi0, SmolVLA).

    Args:
        uniforms: any shape, in [0, 1).

    Returns:
        The same shape, in [0.001, 1): mostly near 1, where x is mostly noise.

    Raises:
        ValueError: a value outside [0, 1] (checked on the CPU).
    """
    if uniforms.device.type == "cpu" and not bool(((uniforms >= 0) & (uniforms <= 1)).all()):
        raise ValueError(f"uniforms must lie in [0, 1], got {uniforms.min().item():.6g} to {uniforms.max().item():.6g}")
    return _TIME_SCALE * uniforms.pow(1.0 / _TIME_SHAPE) + _TIME_OFFSET


def interpolate(actions: Tensor, noise: Tensor, t: float | Tensor) -> Tensor:
    """x_t = t noise + (1 - t) action; all broadcastable to each other."""
    return t * noise + (1.0 - t) * actions


def target_velocity(actions: Tensor, noise: Tensor) -> Tensor:
    """Velocity of the straight line from action to noise: noise - action."""
    return noise - actions


def cfm_loss(v: Tensor, actions: Tensor, noise: Tensor, mask: Tensor | None = None) -> Tensor:
    """Conditional flow-matching loss of each (noise, time) pair: mean squared error of the velocity over a chunk.

    Args:
        v: [..., A, D], the velocity at `interpolate(actions, noise, t)`; [B, n, A, D] for n pairs per decision.
        actions: broadcastable to v; [B, 1, A, D] for n pairs.
        noise: broadcastable to v.
        mask: bool, broadcastable to v: elements that count (no padding). None: all.

    Returns:
        [...]: the mean over the elements that count, 0 if none does; float64 if an input is, float32 otherwise.

    Raises:
        ValueError: shapes that do not broadcast to v, or a mask that is not bool.
    """
    if mask is not None:
        check_mask(mask, "mask")
    for name, tensor in (("actions", actions), ("noise", noise), ("mask", mask)):
        if tensor is not None:
            check_broadcast(name, tensor, v.shape)
    dtype = working_dtype(v, actions, noise)
    error = v.to(dtype) - target_velocity(actions.to(dtype), noise.to(dtype))
    return mean_square(error, mask)


def mean_square(error: Tensor, mask: Tensor | None) -> Tensor:
    """[..., A, D] -> [...]: mean square over the elements of the mask, 0 if there are none."""
    if mask is None:
        return error.square().mean((-2, -1))
    mask = mask.expand_as(error)
    kept = torch.where(mask, error, torch.zeros_like(error))
    return kept.square().sum((-2, -1)) / mask.sum((-2, -1)).clamp(min=1)

"""tanh of a normal variable: bounded actions with a density (Haarnoja et al. 2018, arXiv 1812.05905, appendix C).

All functions work element by element. Elements outside a mask are exactly 0, in actions and log-probs, and receive no
gradient, for any mean and standard deviation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlvla.algorithms.checks import check_broadcast, check_mask, check_shape, clean, working_dtype
from rlvla.algorithms.flow.steps import gaussian_entropy, gaussian_log_prob

LOG_STD_RANGE = (-20.0, 2.0)
# The largest float32 below 1; an action of exactly +-1 would come from an infinite normal variable.
_LARGEST_ACTION = 1.0 - 2.0**-24


def log_one_minus_tanh_squared(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), the logarithm of the derivative of tanh; exact also where tanh(u) rounds to +-1."""
    return 2.0 * (math.log(2.0) - u + logsigmoid(2.0 * u))


def tanh_normal_sample(
    mean: Tensor, log_std: Tensor, noise: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Reparameterised sample tanh(mean + std * noise) and its log-density.

    Args:
        mean: [..., D], before tanh.
        log_std: logarithm of the standard deviation before tanh, broadcastable to mean; clamped to [-20, 2].
        noise: [..., D] standard normal; zeros give the tanh of the mean.
        mask: bool, broadcastable to mean: elements in use. None: all.

    Returns:
        Actions in [-1, 1] and log-densities (nats), [..., D] each, differentiable in mean and log_std; float64 if an
        input is, float32 otherwise.

    Raises:
        ValueError: shapes that do not fit, or a mask that is not bool.
    """
    mean, log_std, noise = _in_use(mask, mean, log_std, noise=noise)
    u = mean + log_std.exp() * noise
    # The density from the noise, not from (u - mean) / std: that loses the noise where std is small.
    normal = gaussian_log_prob(noise, torch.zeros_like(noise), 1.0) - log_std
    return torch.tanh(u), _masked(normal - log_one_minus_tanh_squared(u), mask)


def tanh_normal_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log-density of given actions.

    Args:
        actions: [..., D]; clamped to the largest float32 below 1, so that an action of +-1 has a finite density.
        mean: see `tanh_normal_sample`.
        log_std: see `tanh_normal_sample`.
        mask: see `tanh_normal_sample`.

    Returns:
        [..., D] in nats, differentiable in all inputs (in actions where they are not clamped).

    Raises:
        ValueError: shapes that do not fit, or a mask that is not bool.
    """
    mean, log_std, actions = _in_use(mask, mean, log_std, actions=actions)
    u = torch.atanh(actions.clamp(-_LARGEST_ACTION, _LARGEST_ACTION))
    return _masked(gaussian_log_prob(u, mean, log_std.exp()) - log_one_minus_tanh_squared(u), mask)


def tanh_normal_entropy(mean: Tensor, log_std: Tensor, noise: Tensor, mask: Tensor | None = None) -> Tensor:
    """Unbiased estimate of the entropy: exact for the normal variable, sampled for E[log(1 - tanh(u)^2)].

    There is no closed form. The variance is below that of -log-prob where the standard deviation is below about 0.5.

    Args:
        mean: see `tanh_normal_sample`.
        log_std: see `tanh_normal_sample`.
        noise: [S, ..., D], S samples for each element.
        mask: see `tanh_normal_sample`.

    Returns:
        [..., D] in nats, differentiable in mean and log_std.

    Raises:
        ValueError: shapes that do not fit, or a mask that is not bool.
    """
    mean, log_std, first = _in_use(mask, mean, log_std, noise=noise[0])
    u = mean + log_std.exp() * noise.to(first)
    change = log_one_minus_tanh_squared(u).mean(0)
    return _masked(gaussian_entropy(log_std.exp()) + change, mask)


def _in_use(mask: Tensor | None, mean: Tensor, log_std: Tensor, **other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, clamped log_std and the other tensor, of one shape and dtype, 0 outside the mask."""
    ((name, tensor),) = other.items()
    check_shape(name, tensor, mean.shape)
    check_broadcast("log_std", log_std, mean.shape)
    dtype = working_dtype(mean, log_std, tensor)
    tensors = [mean.to(dtype), log_std.to(dtype).clamp(*LOG_STD_RANGE).expand_as(mean), tensor.to(dtype)]
    if mask is not None:
        check_mask(mask, "mask")
        check_broadcast("mask", mask, mean.shape)
        tensors = [clean(x, mask, dtype) for x in tensors]
    return tensors[0], tensors[1], tensors[2]


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values.masked_fill(~mask, 0.0)

"""One denoising step as a Gaussian, its density, entropy and KL."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_broadcast, check_number, working_dtype
from rlvla.algorithms.choices import FLOW_METHODS

# Grid points are multiples of d; anything closer to 0 or 1 than this share of d is rounding.
_TIME_ROUNDING = 1e-3
_LOG_2PI = math.log(2.0 * math.pi)


def time_grid(steps: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
    """The times of a chain: 1, 1 - 1/K, ..., 1/K, 0.

    Args:
        steps: K, the number of steps; each is 1 / K long.
        dtype: of the result.
        device: of the result.

    Returns:
        [K + 1].

    Raises:
        ValueError: fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    times = torch.linspace(1.0, 1.0 / steps, steps, dtype=dtype, device=device)
    return torch.cat([times, times.new_zeros(1)])


def predict_action(x: Tensor, v: Tensor, t: float | Tensor) -> Tensor:
    """The action at the end of a straight line from x at time t with velocity v: x - t v."""
    return x - t * v


def predict_noise(x: Tensor, v: Tensor, t: float | Tensor) -> Tensor:
    """The noise at the start of a straight line through x at time t with velocity v: x + (1 - t) v."""
    return x + (1.0 - t) * v


def learned_std(features: Tensor, low: float = 0.08, high: float = 0.16) -> Tensor:
    """Standard deviation for the method `noise`: log-variance interpolated between two bounds by tanh.

    Args:
        features: any shape, unbounded; 0 gives the geometric mean of the bounds.
        low: smallest standard deviation.
        high: largest standard deviation.

    Returns:
        The shape of `features`.

    Raises:
        ValueError: bounds not positive or in the wrong order.
    """
    if not 0.0 < low <= high:
        raise ValueError(f"the bounds of the standard deviation must satisfy 0 < low <= high, got {low} and {high}")
    share = 0.5 * (torch.tanh(features) + 1.0)
    return torch.exp(math.log(low) + share * math.log(high / low))


def anneal_noise_level(start: float, end: float, progress: float) -> float:
    """Linear interpolation of the noise level; chains must be scored with the level they were sampled with.

    Args:
        start: level at progress 0.
        end: level at progress 1 and beyond.
        progress: share of training done, at least 0.

    Raises:
        ValueError: a negative or NaN argument.
    """
    for name, value in (("start", start), ("end", end), ("progress", progress)):
        check_number(name, value, low=0.0)
    return start + (end - start) * min(progress, 1.0)


def step_distribution(
    x: Tensor,
    v: Tensor,
    t: float | Tensor,
    d: float | Tensor,
    *,
    method: str,
    noise_level: float | Tensor = 0.5,
    next_t: float | Tensor | None = None,
    std: float | Tensor | None = None,
    std_floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of x at time t - d, given x at time t.

    With n = t - d, x0 = `predict_action` and x1 = `predict_noise`, the mean is (1 - n) x0 + w x1:

    - `ode`: w = n, which gives x - d v; std 0.
    - `sde` (Flow-GRPO): w = n - std^2 / (2 t), std = noise_level sqrt(d t / (1 - t)). It preserves the marginals of
      the ODE as d goes to 0. At t = 1 the denominator is that of the next grid point.
    - `cps` (coefficient-preserving sampling): w = n cos(pi noise_level / 2), std = n sin(pi noise_level / 2), which is
      0 in the last step. It does not preserve the marginals.
    - `noise` (ReinFlow): w = n, std as given.

    Args:
        x: [..., A, D].
        v: velocity at (x, t), same shape.
        t: time in (0, 1], broadcastable to x.
        d: step size, 0 < d <= t, broadcastable to x.
        method: one of `FLOW_METHODS`.
        noise_level: for `sde` at least 0, for `cps` in [0, 1]; broadcastable to x.
        next_t: for `sde` at t = 1, the second grid point; None for t - d.
        std: for `noise`, broadcastable to x, not negative; the other methods ignore it.
        std_floor: lower bound of the standard deviation wherever it is not 0. In `sde` the mean follows, so that the
            marginals are still preserved.

    Returns:
        Mean and standard deviation, both in the shape of x; float64 if x or v is, float32 otherwise. Differentiable in
        x, v and std.

    Raises:
        ValueError: unknown method, shapes that do not fit, `std` missing, or a number out of range.
            Values of tensors are only checked on the CPU.
    """
    if method not in FLOW_METHODS:
        raise ValueError(f"unknown flow method {method!r}; known: {', '.join(FLOW_METHODS)}")
    if x.shape != v.shape:
        raise ValueError(f"x has shape {list(x.shape)} but v has shape {list(v.shape)}; they must be equal")
    check_number("std_floor", std_floor, low=0.0)
    dtype = working_dtype(x, v)
    x, v = x.to(dtype), v.to(dtype)
    t = number_like(x, "t", t, positive=True, high=1.0)
    d = number_like(x, "d", d, positive=True, high=1.0)
    n = _next_time(t, d)
    mean = x - d * v
    if method == "ode":
        return mean, torch.zeros_like(mean)
    if method == "noise":
        if std is None:
            raise ValueError("the method noise needs std, the learned standard deviation")
        return mean, _at_least(std_floor, number_like(x, "std", std)).expand_as(mean)
    level = number_like(x, "noise_level", noise_level, high=1.0 if method == "cps" else math.inf)
    if method == "sde":
        second = n if next_t is None else number_like(x, "next_t", next_t, high=1.0)
        rest = 1.0 - torch.where(t > 1.0 - _TIME_ROUNDING * d, second, t)
        deviation = _at_least(std_floor, level * (d * t / rest).sqrt())
        pull = deviation.square() / (2.0 * t)
    else:
        angle = 0.5 * math.pi * level
        deviation = _at_least(std_floor, n * angle.sin())
        pull = n * (1.0 - angle.cos())
    return mean - pull * predict_noise(x, v, t), deviation.expand_as(mean)


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: float | Tensor) -> Tensor:
    """Log-density of each element under a normal distribution, in nats.

    An element with standard deviation 0 is not random: it contributes 0 and receives no gradient.

    Args:
        x_next: [..., A, D].
        mean: same shape.
        std: not negative, broadcastable to x_next.

    Returns:
        [..., A, D]; float64 if any input is, float32 otherwise.

    Raises:
        ValueError: shapes that do not fit, or a negative `std` (checked on the CPU).
    """
    _check_same_shape("x_next", x_next, "mean", mean)
    dtype = working_dtype(x_next, mean, std if isinstance(std, Tensor) else None)
    std = number_like(x_next.to(dtype), "std", std).expand_as(x_next)
    random = std > 0
    # Values are replaced before they are used: a NaN behind `where` would still reach the gradient.
    distance = torch.where(random, x_next.to(dtype) - mean.to(dtype), torch.zeros_like(std))
    safe = torch.where(random, std, torch.ones_like(std))
    density = -0.5 * ((distance / safe).square() + _LOG_2PI) - safe.log()
    return torch.where(random, density, torch.zeros_like(density))


def gaussian_entropy(std: Tensor) -> Tensor:
    """Differential entropy of each element, log(2 pi e std^2) / 2 in nats; 0 with no gradient where std is 0."""
    random = std > 0
    safe = torch.where(random, std, torch.ones_like(std))
    return torch.where(random, 0.5 * (1.0 + _LOG_2PI) + safe.log(), torch.zeros_like(std))


def gaussian_kl(mean: Tensor, std: Tensor, other_mean: Tensor, other_std: Tensor) -> Tensor:
    """Exact KL(N(mean, std^2) || N(other_mean, other_std^2)) of each element, in nats.

    (mean - other_mean)^2 / (2 std^2) where both share std. Elements with standard deviation 0 contribute 0, as in
    `gaussian_log_prob`; both distributions must agree on them.

    Args:
        mean: [..., A, D].
        std: broadcastable to mean.
        other_mean: same shape as mean.
        other_std: broadcastable to mean.

    Returns:
        [..., A, D], differentiable.

    Raises:
        ValueError: shapes that do not fit, or on the CPU a negative standard deviation or one that is 0 in only one of
            the distributions.
    """
    _check_same_shape("mean", mean, "other_mean", other_mean)
    dtype = working_dtype(mean, std, other_mean, other_std)
    mean, other_mean = mean.to(dtype), other_mean.to(dtype)
    std = number_like(mean, "std", std).expand_as(mean)
    other_std = number_like(mean, "other_std", other_std).expand_as(mean)
    random = (std > 0) & (other_std > 0)
    if mean.device.type == "cpu" and not torch.equal(random, (std > 0) | (other_std > 0)):
        raise ValueError("std and other_std must be 0 for the same elements: the KL of the others is infinite")
    safe = torch.where(random, std, torch.ones_like(std))
    other_safe = torch.where(random, other_std, torch.ones_like(std))
    distance = torch.where(random, mean - other_mean, torch.zeros_like(mean))
    ratio = safe / other_safe
    return 0.5 * (ratio.square() - 1.0 + (distance / other_safe).square()) - ratio.log()


def _next_time(t: Tensor, d: Tensor) -> Tensor:
    """The time t - d after a step, exactly 0 for the last one."""
    n = t - d
    if n.device.type == "cpu" and bool((n < -_TIME_ROUNDING * d).any()):
        raise ValueError(f"d must not exceed t, but t - d is {n.min().item():.4g}: time ends at 0")
    return torch.where(n < _TIME_ROUNDING * d, torch.zeros_like(n), n)


def _at_least(floor: float, std: Tensor) -> Tensor:
    return torch.where(std > 0, std.clamp(min=floor), std) if floor > 0 else std


def _check_same_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} but {other_name} has shape {list(other.shape)}; they must be equal"
        )


def number_like(
    like: Tensor, name: str, value: float | Tensor, *, positive: bool = False, high: float = math.inf
) -> Tensor:
    """A number as a tensor that broadcasts to `like`, of its dtype and on its device.

    Args:
        like: any shape.
        name: for error messages.
        value: a number, or a tensor that broadcasts to `like`.
        positive: whether 0 is out of range; negative values always are.
        high: largest value.

    Raises:
        ValueError: a shape that does not broadcast, or a value out of range. Values on an accelerator are not checked,
            because that would wait for it.
    """
    if isinstance(value, Tensor):
        tensor = value.to(dtype=like.dtype, device=like.device)
    else:  # `as_tensor` would copy the number from the host and wait for it
        tensor = torch.full((), value, dtype=like.dtype, device=like.device)
    check_broadcast(name, tensor, like.shape)
    if tensor.device.type == "cpu":
        valid = ((tensor > 0) if positive else (tensor >= 0)) & (tensor <= high)
        if not bool(valid.all()):
            bounds = f"{'(' if positive else '['}0, {high:g}]"
            raise ValueError(f"{name} must lie in {bounds}, got {tensor[~valid].flatten()[0].item():.6g}")
    return tensor

"""Flow matching on one-dimensional normal data, in plain Python: exact velocity, steps, moments, expected reward."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

MEAN, STD, TARGET = 0.7, 0.3, 1.0
LEVEL = 0.5


def coefficients(t: float) -> tuple[float, float]:
    """Intercept and slope of E[noise - action | x_t = x]."""
    variance = t**2 + (1 - t) ** 2 * STD**2
    slope = (t - (1 - t) * STD**2) / variance
    return -MEAN - slope * (1 - t) * MEAN, slope


def reference_step(
    x: float, v: float, i: int, steps: int, method: str, level: float = LEVEL, std: float = 0.0
) -> tuple[float, float]:
    """Mean and standard deviation after step i of a chain, from the weights of predicted action and noise."""
    t, n, d = (steps - i) / steps, (steps - i - 1) / steps, 1 / steps
    action, noise = x - t * v, x + (1 - t) * v
    weight, deviation = n, 0.0
    if method == "sde":
        rest = 1 - n if i == 0 else 1 - t
        s = level * math.sqrt(t / rest)
        weight, deviation = n - s**2 * d / (2 * t), math.sqrt(d) * s
    elif method == "cps":
        weight, deviation = n * math.cos(math.pi * level / 2), n * math.sin(math.pi * level / 2)
    elif method == "noise":
        deviation = std
    return (1 - n) * action + weight * noise, deviation


def reference_moments(
    methods: Sequence[str],
    shifts: Sequence[tuple[float, float]] | None = None,
    stds: Sequence[float] | None = None,
    level: float = LEVEL,
) -> tuple[float, float]:
    """Mean and standard deviation at t = 0; shifts are added to intercept and slope of each step's velocity."""
    steps, mean, variance = len(methods), 0.0, 1.0
    for i, method in enumerate(methods):
        intercept, slope = coefficients((steps - i) / steps)
        if shifts is not None:
            intercept, slope = intercept + shifts[i][0], slope + shifts[i][1]
        std = stds[i] if stds is not None else 0.0
        start, deviation = reference_step(0.0, intercept, i, steps, method, level, std)
        factor = reference_step(1.0, intercept + slope, i, steps, method, level, std)[0] - start
        mean, variance = start + factor * mean, factor**2 * variance + deviation**2
    return mean, math.sqrt(variance)


def reward_derivative(
    methods: Sequence[str], steps: Collection[int], std: float = 0.0, std_slope: float = 0.0
) -> list[float]:
    """Derivative of the expected reward -(x_0 - TARGET)^2 in (intercept, slope, std parameter) of the given steps."""
    tiny = 1e-5

    def reward(change: Sequence[float]) -> float:
        shifts = [(change[0], change[1]) if i in steps else (0.0, 0.0) for i in range(len(methods))]
        stds = [std + std_slope * change[2] if i in steps else std for i in range(len(methods))]
        mean, deviation = reference_moments(methods, shifts, stds)
        return -(deviation**2) - (mean - TARGET) ** 2

    units = [[tiny * (i == j) for j in range(3)] for i in range(3)]
    return [(reward(u) - reward([-c for c in u])) / (2 * tiny) for u in units]

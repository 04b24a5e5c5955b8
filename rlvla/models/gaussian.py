"""A diagonal Gaussian over the normalized action chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlvla.models.policy import PolicyOutput

LOG_2PI = math.log(2.0 * math.pi)


class GaussianDistribution:
    """Independent normal distributions over the numbers in a chunk, in float32.

    The K = A * D columns are in (action, dimension) order. A log-probability is a log-density and may be positive.

    Args:
        mean: [B, A, D].
        log_std: logarithm of the standard deviation, broadcastable to `mean`.
        temperature: multiplies the standard deviation.

    Raises:
        ValueError: the temperature is not positive.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, temperature: float = 1.0):
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it must be positive")
        self.mean = mean.float()
        self.log_std = (log_std.float() + math.log(temperature)).expand_as(self.mean)

    @property
    def std(self) -> Tensor:
        """Standard deviation [B, A, D]."""
        return self.log_std.exp()

    def sample(self, noise: Tensor | None = None) -> PolicyOutput:
        """Sample a chunk, without gradients.

        Args:
            noise: [B, A, D] standard normal; None takes the mean.
        """
        with torch.no_grad():
            actions = (self.mean if noise is None else self.rsample(noise)).detach()
            trace = {"actions": actions}
            return PolicyOutput(actions, self.log_prob(trace), trace)

    def rsample(self, noise: Tensor) -> Tensor:
        """[B, A, D]: mean + std * noise, differentiable in both."""
        return self.mean + self.std * noise.to(self.mean)

    def log_prob(self, trace: Mapping[str, Tensor]) -> Tensor:
        """[B, K]: log-density of each number of `trace["actions"]` [B, A, D]."""
        standardised = (trace["actions"].to(self.mean) - self.mean) * (-self.log_std).exp()
        return (-0.5 * (standardised.square() + LOG_2PI) - self.log_std).flatten(1)

    def entropy(self) -> Tensor:
        """[B, K]: differential entropy in nats."""
        return (0.5 * (1.0 + LOG_2PI) + self.log_std).flatten(1)

    def kl(self, other: Mapping[str, Tensor]) -> Tensor:
        """[B, K]: KL(self || other) in nats, where `other` is the `parameters` of another Gaussian."""
        mean, log_std = other["mean"], other["log_std"]
        ratio = (2.0 * (self.log_std - log_std)).exp()
        distance = (self.mean - mean).square() * (-2.0 * log_std).exp()
        return (0.5 * (ratio + distance - 1.0) - (self.log_std - log_std)).flatten(1)

    def sum_pi_squared(self) -> Tensor:
        """Not defined for densities."""
        raise NotImplementedError("a density has no sum of squared probabilities")

    def parameters(self) -> dict[str, Tensor]:
        """`mean` and `log_std` [B, A, D], with the temperature already applied."""
        return {"mean": self.mean, "log_std": self.log_std}

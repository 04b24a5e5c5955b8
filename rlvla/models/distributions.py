"""Action distributions: sampling, log-probabilities, entropy and KL."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from rlvla.algorithms.kl import kl_penalty


@dataclass
class PolicyOutput:
    """A batch of decisions on the device.

    Attributes:
        actions: [B, A, D] float32, normalized; None if `trace` defines them more precisely.
        log_probs: [B, K] float32.
        trace: inputs of `ActionDistribution.log_prob` for rescoring the decisions, name -> [B, ...].
    """

    actions: Tensor | None
    log_probs: Tensor
    trace: dict[str, Tensor]


class ActionDistribution(Protocol):
    """The distributions of B decisions, each conditioned on its observation.

    Methods that a policy does not support raise `NotImplementedError`; `PolicySpec.missing` lists them with the reason.
    """

    def sample(self, noise: Tensor | None) -> PolicyOutput:
        """Draw decisions from random numbers [B, *noise_shape]; None takes the mode."""
        ...

    def log_prob(self, trace: Mapping[str, Tensor]) -> Tensor:
        """[B, K] float32 (nats) of sampled decisions; bit-identical to `sample` if the policy is unchanged."""
        ...

    def entropy(self) -> Tensor:
        """[B, K] float32 (nats), differentiable."""
        ...

    def kl(self, other: Mapping[str, Tensor]) -> Tensor:
        """[B, K] float32 (nats): exact KL(self || other); `other` is the `parameters` of the other distribution."""
        ...

    def rsample(self, noise: Tensor) -> Tensor:
        """Reparameterized sample: normalized actions [B, A, D], differentiable in the parameters."""
        ...

    def sum_pi_squared(self) -> Tensor:
        """[B, K] float32: sum of squared probabilities over the outcomes of each column."""
        ...

    def parameters(self) -> dict[str, Tensor]:
        """Parameters for the `kl` of another distribution, name -> [B, ...]."""
        ...


class TokenDistribution:
    """Independent categorical distributions over a vocabulary of action tokens.

    Args:
        logits: [B, K, V] float32.
        temperature: divides the logits.
    """

    def __init__(self, logits: Tensor, temperature: float):
        self._logits, self._temperature = logits, temperature

    @cached_property
    def all_log_probs(self) -> Tensor:
        """[B, K, V]: log-probabilities of the whole vocabulary."""
        return torch.log_softmax(self._logits / self._temperature, dim=-1)

    def sample(self, noise: Tensor | None) -> PolicyOutput:
        """By inverse CDF from uniforms [B, K], or the argmax; the trace is `tokens` [B, K] int64."""
        tokens = self._logits.argmax(-1) if noise is None else sample_by_inverse_cdf(self.all_log_probs, noise)
        trace = {"tokens": tokens}
        return PolicyOutput(None, self.log_prob(trace), trace)

    def log_prob(self, trace: Mapping[str, Tensor]) -> Tensor:
        """[B, K] of `tokens`."""
        return self.all_log_probs.gather(-1, trace["tokens"].unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """[B, K]."""
        return -(self.all_log_probs.exp() * self.all_log_probs).sum(-1)

    def kl(self, other: Mapping[str, Tensor]) -> Tensor:
        """[B, K], over the whole vocabulary."""
        return kl_penalty(self.all_log_probs, other["log_probs"], "full")

    def rsample(self, noise: Tensor) -> Tensor:
        """Not defined for tokens."""
        raise NotImplementedError("tokens are discrete: a sample has no gradient")

    def sum_pi_squared(self) -> Tensor:
        """[B, K]."""
        return self.all_log_probs.exp().square().sum(-1)

    def parameters(self) -> dict[str, Tensor]:
        """`log_probs` [B, K, V]."""
        return {"log_probs": self.all_log_probs}


class AutoregressiveTokens:
    """Tokens decoded one by one: sampling runs the network once per token.

    Args:
        decode: takes `choose(logits [B, V], step) -> tokens [B]` and returns the logits [B, K, V] of all steps.
        teacher_forced: tokens [B, K] -> logits [B, K, V] given these tokens.
        temperature: divides the logits.
    """

    def __init__(
        self,
        decode: Callable[[Callable[[Tensor, int], Tensor]], Tensor],
        teacher_forced: Callable[[Tensor], Tensor],
        temperature: float,
    ):
        self._decode, self._teacher_forced, self._temperature = decode, teacher_forced, temperature

    def sample(self, noise: Tensor | None) -> PolicyOutput:
        """Like `TokenDistribution.sample`, each token conditioned on those before it."""
        tokens: list[Tensor] = []

        def choose(logits: Tensor, step: int) -> Tensor:
            drawn = None if noise is None else noise[:, step : step + 1]
            tokens.append(pick_tokens(logits[:, None].float(), self._temperature, drawn)[:, 0])
            return tokens[-1]

        logits = self._decode(choose).float()
        trace = {"tokens": torch.stack(tokens, 1)}
        return PolicyOutput(None, TokenDistribution(logits, self._temperature).log_prob(trace), trace)

    def given(self, trace: Mapping[str, Tensor]) -> TokenDistribution:
        """The distribution of each token given the tokens before it."""
        return TokenDistribution(self._teacher_forced(trace["tokens"]).float(), self._temperature)

    def log_prob(self, trace: Mapping[str, Tensor]) -> Tensor:
        """[B, K] of `tokens`."""
        return self.given(trace).log_prob(trace)


def pick_tokens(logits: Tensor, temperature: float, uniforms: Tensor | None) -> Tensor:
    """Columns [B, K] from logits [B, K, V]: sampled with uniforms [B, K] at a temperature, or the argmax."""
    if uniforms is None:
        return logits.argmax(-1)
    return sample_by_inverse_cdf(torch.log_softmax(logits / temperature, dim=-1), uniforms)


def sample_by_inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [B, K] whose cumulative probability first exceeds the uniforms [B, K]; log_probs [B, K, V].

    Unlike `torch.multinomial`, the result for a row does not depend on the rest of the batch.
    """
    cumulative = log_probs.double().exp().cumsum(-1)
    # Rounding may leave the total below 1; scaling keeps every draw in range.
    threshold = uniforms.unsqueeze(-1).double() * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1).clamp_max(log_probs.shape[-1] - 1)


LOG_2PI = math.log(2.0 * math.pi)


class GaussianDistribution:
    """Gaussian distribution over a chunk, with independent or AR(1) noise along its actions, in float32.

    The K = A * D columns are in (action, dimension) order. Log-probs are log-densities and may be positive. With a
    correlation rho the noise of each dimension is a stationary AR(1) process: actions i and j have the correlation
    rho**|i - j|, and each log-prob is conditional on the earlier actions of the chunk.

    Args:
        mean: [B, A, D].
        log_std: logarithm of the marginal standard deviation, broadcastable to `mean`.
        temperature: multiplies the standard deviation.
        correlation: rho, the AR(1) coefficient of the noise, in [0, 1).

    Raises:
        ValueError: the temperature is not positive.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, temperature: float = 1.0, correlation: float = 0.0):
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it must be positive")
        self.mean = mean.float()
        self.log_std = (log_std.float() + math.log(temperature)).expand_as(self.mean)
        self._correlation = correlation
        self._innovation_std = math.sqrt(1.0 - correlation**2)  # relative to that of the noise

    @property
    def marginals(self) -> GaussianDistribution:
        """The marginal distributions."""
        return GaussianDistribution(self.mean, self.log_std)

    @property
    def std(self) -> Tensor:
        """Standard deviation [B, A, D]."""
        return self.log_std.exp()

    def sample(self, noise: Tensor | None = None) -> PolicyOutput:
        """Sample without gradients from standard normal noise [B, A, D]; None takes the mean."""
        with torch.no_grad():
            actions = (self.mean if noise is None else self.rsample(noise)).detach()
            trace = {"actions": actions}
            return PolicyOutput(actions, self.log_prob(trace), trace)

    def rsample(self, noise: Tensor) -> Tensor:
        """[B, A, D]: mean + std * noise, differentiable in both; `noise` becomes correlated over the actions."""
        noise = noise.to(self.mean)
        if self._correlation:
            steps = [noise[:, 0]]
            for innovation in noise[:, 1:].unbind(1):
                steps.append(self._correlation * steps[-1] + self._innovation_std * innovation)
            noise = torch.stack(steps, 1)
        return self.mean + self.std * noise

    def log_prob(self, trace: Mapping[str, Tensor]) -> Tensor:
        """[B, K]: log-density of each number of `trace["actions"]` [B, A, D], conditional on earlier actions."""
        standardised = (trace["actions"].to(self.mean) - self.mean) * (-self.log_std).exp()
        return (-0.5 * (self._whitened(standardised).square() + LOG_2PI) - self._conditional_log_std).flatten(1)

    def entropy(self) -> Tensor:
        """[B, K]: differential entropy in nats, conditional on earlier actions."""
        return (0.5 * (1.0 + LOG_2PI) + self._conditional_log_std).flatten(1)

    def kl(self, other: Mapping[str, Tensor]) -> Tensor:
        """[B, K]: KL(self || other) in nats; `other` is the `parameters` of a Gaussian with the same correlation.

        Each column is an expectation over the earlier actions.
        """
        mean, log_std = other["mean"], other["log_std"]
        difference = self.log_std - log_std
        ratio, distance = (2.0 * difference).exp(), (self.mean - mean).square() * (-2.0 * log_std).exp()
        if self._correlation:  # the conditional means differ, too, where the ratio of the standard deviations changes
            scale, distance = difference.exp(), self._whitened((self.mean - mean) * (-log_std).exp()).square()
            change = (self._correlation / self._innovation_std * (scale[:, 1:] - scale[:, :-1])).square()
            ratio = torch.cat([ratio[:, :1], ratio[:, 1:] + change], 1)
        return (0.5 * (ratio + distance - 1.0) - difference).flatten(1)

    def _whitened(self, noise: Tensor) -> Tensor:
        """Innovations [B, A, D] of standardised noise."""
        if not self._correlation:
            return noise
        innovations = (noise[:, 1:] - self._correlation * noise[:, :-1]) / self._innovation_std
        return torch.cat([noise[:, :1], innovations], 1)

    @property
    def _conditional_log_std(self) -> Tensor:
        """Conditional log standard deviation [B, A, D]."""
        if not self._correlation:
            return self.log_std
        return torch.cat([self.log_std[:, :1], self.log_std[:, 1:] + math.log(self._innovation_std)], 1)

    def sum_pi_squared(self) -> Tensor:
        """Not defined for densities."""
        raise NotImplementedError("a density has no sum of squared probabilities")

    def parameters(self) -> dict[str, Tensor]:
        """`mean` and `log_std` [B, A, D], at the temperature."""
        return {"mean": self.mean, "log_std": self.log_std}

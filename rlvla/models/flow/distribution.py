"""The distribution of a flow-matching policy's decisions: a chain of denoising steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from rlvla.algorithms.flow import (
    FlowSampling,
    ScoredSteps,
    Velocity,
    gaussian_entropy,
    gaussian_kl,
    mirrored_terms,
    noisy_step_index,
    sample_chain,
    score_chain,
)
from rlvla.models.flow.settings import FlowSettings
from rlvla.models.policy import PolicyOutput

# Entries of the trace besides the chain: `x_0` is not scored, `noise_level` is that of sampling.
_LEVEL = "noise_level"
# Of policies that are scored against what sampled: the mean of the noisy steps [B, R, A, D].
_SAMPLED_MEAN = "sampled_mean"
# Smallest standard deviation where each step has a ratio of its own (DPPO, Ren et al. 2024).
_STD_FLOOR_OF_STEPS = 0.1


def noise_width(settings: FlowSettings, chunk: tuple[int, int], denoised: tuple[int, int] | None = None) -> int:
    """Random numbers of a decision: x_1, then the noise of the steps, then one that chooses the noisy step."""
    numbers, (actions, dims) = chunk[0] * chunk[1], denoised or chunk
    steps = numbers + 1 if settings.noisy_steps == "one" else settings.steps * numbers
    return actions * dims + steps


class FlowDistribution:
    """Chains from Gaussian noise to actions; the K = A * D columns are in (action, dimension) order.

    The network may denoise more than a decision consists of: more actions than are executed, or dimensions that are
    padding. The surplus starts from random numbers too but carries no noise of its own: it follows the ODE.

    A log-probability is that of the noisy steps given where each of them started: of one step, drawn at random, or the
    sum over all. If the settings score each step on its own, the columns are in (action, step, dimension) order. x_1 is
    drawn from a standard normal that does not depend on the policy and drops out of every ratio.

    Args:
        velocity: the network, given the observations; see `rlvla.algorithms.flow.Velocity`.
        settings: method, number of steps, and how greedy decisions start.
        chunk: (A, D).
        blank: [B, `noise_width`] float32 zeros, for the number of rows and the device.
        temperature: multiplies the noise level, or the learned standard deviation.
        noise_level: in place of that of the settings, while it is annealed.
        denoised: (C, M), actions and dimensions that the network denoises together, at least as many as in `chunk`;
            x and the chains have these sizes. None: `chunk`.

    Raises:
        ValueError: the temperature is not positive.
    """

    def __init__(
        self,
        velocity: Velocity,
        settings: FlowSettings,
        chunk: tuple[int, int],
        blank: Tensor,
        temperature: float = 1.0,
        noise_level: float | None = None,
        denoised: tuple[int, int] | None = None,
    ):
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it must be positive")
        self._settings, self._chunk, self._blank, self._temperature = settings, chunk, blank, temperature
        self._denoised, self._mask = denoised or chunk, None
        if self._denoised != chunk:
            self._mask = torch.zeros((1, *self._denoised), dtype=torch.bool, device=blank.device)
            self.executed(self._mask)[:] = True
        self._level = settings.noise_level if noise_level is None else noise_level
        self._velocity = velocity
        floor = _STD_FLOOR_OF_STEPS if settings.scores == "step_log_probs" else 0.0
        self._sampling = FlowSampling(settings.method, settings.steps, settings.noisy_steps, floor)

    def executed(self, values: Tensor) -> Tensor:
        """[..., C, M] -> [..., A, D], what of a chunk the decision consists of."""
        return values[..., : self._chunk[0], : self._chunk[1]]

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Noisy actions x [B, R, C, M], t [B, R] -> [B, R, C, M]."""
        output = self._velocity(x, t)
        return output[0] if isinstance(output, tuple) else output

    def _evaluate(self, x: Tensor, t: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The velocity, with the standard deviation at the temperature if it is learned."""
        output = self._velocity(x, t)
        return (output[0], self._temperature * output[1]) if isinstance(output, tuple) else output

    def sample(self, noise: Tensor | None, *, greedy: bool = False) -> PolicyOutput:
        """Denoise, without gradients.

        Args:
            noise: [B, `noise_width`] standard normal; None for greedy decisions from x_1 = 0.
            greedy: follow the ODE from the x_1 in `noise`; the log-probs are those of the actions on it.
        """
        if noise is None or (greedy and self._settings.eval_noise == "zero"):
            noise, greedy = self._blank, True
        with torch.no_grad():
            x_1, drawn, index = self._split(noise.float())
            mask = self._mask
            if greedy:
                mask = torch.zeros((1, *self._denoised), dtype=torch.bool, device=x_1.device)
            level = torch.full((len(x_1),), self._level, dtype=torch.float32, device=x_1.device)
            trace, scored = sample_chain(
                self._evaluate,
                x_1,
                drawn,
                self._sampling,
                index=index,
                mask=mask,
                noise_level=self._scaled(level),
            )
            trace = {**trace, _LEVEL: level}
            given = self.given(trace) if greedy else self._given(scored, trace)
            if self._settings.scores == "mirrored":
                trace[_SAMPLED_MEAN] = given.parameters()["mean"]
            log_probs = given.log_prob(trace)
            actions = trace["x_0"] if "x_0" in trace else trace["chain"][:, -1]
            return PolicyOutput(self.executed(actions), log_probs, trace)

    def _split(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x_1 [B, C, M], the noise of the steps, and the index of the noisy step, if only one is."""
        settings, start = self._settings, self._denoised[0] * self._denoised[1]
        x_1 = noise[:, :start].unflatten(1, self._denoised)
        if settings.noisy_steps == "all":
            return x_1, self._padded(noise[:, start:].unflatten(1, (settings.steps, *self._chunk))), None
        uniforms = torch.special.ndtr(noise[:, -1].double())
        index = noisy_step_index(uniforms, settings.method, settings.steps)
        return x_1, self._padded(noise[:, start:-1].unflatten(1, self._chunk)), index

    def _padded(self, noise: Tensor) -> Tensor:
        """[..., A, D] -> [..., C, M], with zeros."""
        (actions, dims), (all_actions, all_dims) = self._chunk, self._denoised
        return functional.pad(noise, (0, all_dims - dims, 0, all_actions - actions))

    def _scaled(self, level: Tensor) -> Tensor:
        """The noise level at the temperature."""
        return level * self._temperature if self._settings.method == "sde" else (level * self._temperature).clamp(max=1)

    def given(self, trace: Mapping[str, Tensor]) -> FlowSteps:
        """The distributions of the noisy steps of sampled chains, each given where it started."""
        level = self._scaled(trace[_LEVEL])
        scored = score_chain(self._evaluate, trace, self._sampling, mask=self._mask, noise_level=level)
        return self._given(scored, trace)

    def _given(self, scored: ScoredSteps, trace: Mapping[str, Tensor]) -> FlowSteps:
        parts = (self.executed(part) for part in (scored.mean, scored.std, scored.log_probs))
        after = trace["after"].unsqueeze(1) if "after" in trace else trace["chain"][:, 1:]
        apart = self._settings.scores == "step_log_probs"
        return FlowSteps(ScoredSteps(*parts), self._settings.learns_std, self.executed(after), apart=apart)

    def log_prob(self, trace: Mapping[str, Tensor]) -> Tensor:
        """[B, K] of sampled chains."""
        return self.given(trace).log_prob(trace)


class FlowSteps:
    """The Gaussian steps of given chains.

    Args:
        scored: their distributions and the log-probs of what was sampled.
        learned: whether the standard deviation can be changed by training.
        after: [B, R, A, D], where they went.
        apart: whether each noisy step has columns of its own, in (action, step, dimension) order; otherwise the columns
            are sums over the noisy steps.
    """

    def __init__(self, scored: ScoredSteps, learned: bool, after: Tensor, *, apart: bool = False):
        self._scored, self._learned, self._after, self._apart = scored, learned, after, apart

    def _columns(self, values: Tensor) -> Tensor:
        """[B, R, A, D] -> [B, K]."""
        return values.transpose(1, 2).flatten(1) if self._apart else values.sum(1).flatten(1)

    def log_prob(self, trace: Mapping[str, Tensor]) -> Tensor:
        """[B, K] of these chains."""
        return self._columns(self._scored.log_probs)

    def entropy(self) -> Tensor:
        """[B, K]."""
        if not self._learned:
            raise NotImplementedError("the noise of these steps is a constant, and so is their entropy")
        return self._columns(gaussian_entropy(self._scored.std))

    def kl(self, other: Mapping[str, Tensor]) -> Tensor:
        """[B, K]: exact KL of each step given where it started."""
        return self._columns(gaussian_kl(self._scored.mean, self._scored.std, other["mean"], other["std"]))

    def mirrored(self, trace: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`mirrored_terms` against the policy that sampled, [B, K], averaged over the noisy steps."""
        terms = mirrored_terms(self._scored.mean, trace[_SAMPLED_MEAN], self._after, self._scored.std)
        return {name: values.mean(1).flatten(1) for name, values in terms.items()}

    def sum_pi_squared(self) -> Tensor:
        """Not defined for densities."""
        raise NotImplementedError("a density has no sum of squared probabilities")

    def parameters(self) -> dict[str, Tensor]:
        """`mean` and `std` [B, R, A, D] of the R noisy steps."""
        return {"mean": self._scored.mean, "std": self._scored.std}

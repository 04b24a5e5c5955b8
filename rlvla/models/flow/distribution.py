"""Decisions of a flow-matching policy: a chain of noisy denoising steps, or an ODE scored by its flow-matching loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from rlvla.algorithms.flow import (
    FlowSampling,
    ScoredSteps,
    Velocity,
    flow_matching_time,
    gaussian_entropy,
    gaussian_kl,
    interpolate,
    mirrored_terms,
    noisy_step_index,
    sample_chain,
    sample_ode,
    score_chain,
    target_velocity,
)
from rlvla.models.flow.settings import MATCHED_PAIRS, FlowSettings
from rlvla.models.policy import PolicyOutput

# Entries of the trace besides the chain: `x_0` is not scored, `noise_level` is that of sampling.
_LEVEL = "noise_level"
# Mean of the noisy steps [B, R, A, D] under the policy that sampled, for scores relative to it.
_SAMPLED_MEAN = "sampled_mean"
# Smallest standard deviation where each step has a ratio of its own (DPPO, Ren et al. 2024).
_STD_FLOOR_OF_STEPS = 0.1


def noise_width(settings: FlowSettings, chunk: tuple[int, int], denoised: tuple[int, int] | None = None) -> int:
    """Number of random numbers per decision.

    For a chain: x_1, the noise of the steps, and one that selects the only noisy step. With the method `ode`: x_1, and
    for each pair the noise of a chunk and its time.
    """
    executed, (actions, dims) = chunk[0] * chunk[1], denoised or chunk
    if settings.method == "ode":
        return actions * dims + MATCHED_PAIRS * (actions * dims + 1)
    return actions * dims + (executed + 1 if settings.noisy_steps == "one" else settings.steps * executed)


class FlowDecisions:
    """Decisions of B observations; the K = A * D columns are in (action, dimension) order.

    The network may denoise a larger array than a decision: more actions than are executed, or padded dimensions.

    Args:
        velocity: the network, conditioned on the observations; see `rlvla.algorithms.flow.Velocity`.
        settings: method, number of steps, and start of greedy decisions.
        chunk: (A, D).
        blank: [B, `noise_width`] float32 zeros, for the number of rows and the device.
        denoised: (C, M), actions and dimensions that the network denoises together, at least as many as in `chunk`;
            x and the trace have these sizes. None: `chunk`.
        temperature: of chains: multiplies the noise level, or the learned standard deviation.
        noise_level: of chains: overrides that of the settings, while it is annealed.

    Raises:
        ValueError: the temperature is not positive.
    """

    def __init__(
        self,
        velocity: Velocity,
        settings: FlowSettings,
        chunk: tuple[int, int],
        blank: Tensor,
        denoised: tuple[int, int] | None = None,
        *,
        temperature: float = 1.0,
        noise_level: float | None = None,
    ):
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it must be positive")
        self._velocity, self._settings, self._chunk, self._blank = velocity, settings, chunk, blank
        self._denoised, self._temperature = denoised or chunk, temperature
        self._level = settings.noise_level if noise_level is None else noise_level
        self._mask: Tensor | None = None  # [1, C, M]: the executed part, unless it is everything
        if self._denoised != chunk:
            self._mask = torch.zeros((1, *self._denoised), dtype=torch.bool, device=blank.device)
            self.executed(self._mask)[:] = True
        floor = _STD_FLOOR_OF_STEPS if settings.scores == "step_log_probs" else 0.0
        self._sampling = FlowSampling(settings.method, settings.steps, settings.noisy_steps, floor)

    def executed(self, values: Tensor) -> Tensor:
        """[..., C, M] -> [..., A, D]: the part of a chunk that the decision consists of."""
        return values[..., : self._chunk[0], : self._chunk[1]]

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Noisy actions x [B, R, C, M], t [B, R] -> [B, R, C, M]."""
        output = self._velocity(x, t)
        return output[0] if isinstance(output, tuple) else output


class FlowDistribution(FlowDecisions):
    """Chains of denoising steps from Gaussian noise to actions.

    A log-probability is that of the noisy steps given the states they start from: of one step, drawn at random, or the
    sum over all. If the settings score each step on its own, the columns are in (action, step, dimension) order. x_1 is
    drawn from a standard normal that does not depend on the policy and drops out of every ratio. Surplus actions and
    dimensions start from random numbers too but carry no noise: they follow the ODE.
    """

    def _evaluate(self, x: Tensor, t: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The velocity, with the standard deviation at the temperature if it is learned."""
        output = self._velocity(x, t)
        return (output[0], self._temperature * output[1]) if isinstance(output, tuple) else output

    def sample(self, noise: Tensor | None, *, greedy: bool = False) -> PolicyOutput:
        """Denoise, without gradients.

        Args:
            noise: [B, `noise_width`] standard normal; None for greedy decisions from x_1 = 0.
            greedy: follow the ODE from the x_1 in `noise`, with the log-probs of the actions on it.
        """
        if noise is None or (greedy and self._settings.eval_noise == "zero"):
            noise, greedy = self._blank, True
        with torch.no_grad():
            x_1, step_noise, index = self._split(noise.float())
            mask = self._mask
            if greedy:
                mask = torch.zeros((1, *self._denoised), dtype=torch.bool, device=x_1.device)
            level = torch.full((len(x_1),), self._level, dtype=torch.float32, device=x_1.device)
            trace, scored = sample_chain(
                self._evaluate,
                x_1,
                step_noise,
                self._sampling,
                index=index,
                mask=mask,
                noise_level=self._scaled(level),
            )
            trace = {**trace, _LEVEL: level}
            given = self.given(trace) if greedy else self._steps(scored, trace)
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
        """The distributions of the noisy steps of sampled chains, each given the state it starts from."""
        level = self._scaled(trace[_LEVEL])
        scored = score_chain(self._evaluate, trace, self._sampling, mask=self._mask, noise_level=level)
        return self._steps(scored, trace)

    def _steps(self, scored: ScoredSteps, trace: Mapping[str, Tensor]) -> FlowSteps:
        executed = ScoredSteps(*(self.executed(values) for values in (scored.mean, scored.std, scored.log_probs)))
        after = trace["after"].unsqueeze(1) if "after" in trace else trace["chain"][:, 1:]
        apart = self._settings.scores == "step_log_probs"
        return FlowSteps(executed, self._settings.learns_std, self.executed(after), apart=apart)

    def log_prob(self, trace: Mapping[str, Tensor]) -> Tensor:
        """[B, K] of sampled chains."""
        return self.given(trace).log_prob(trace)


class FlowSteps:
    """The Gaussian steps of sampled chains.

    Args:
        scored: distributions of the steps, and log-probs of the sampled states.
        learned: whether training changes the standard deviation.
        after: [B, R, A, D], the sampled states.
        apart: whether each noisy step has its own columns, in (action, step, dimension) order; otherwise the columns
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
        """[B, K]: exact KL of each step given the state it starts from."""
        return self._columns(gaussian_kl(self._scored.mean, self._scored.std, other["mean"], other["std"]))

    def mirrored(self, trace: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`mirrored_terms` relative to the policy that sampled, [B, K], averaged over the noisy steps."""
        terms = mirrored_terms(self._scored.mean, trace[_SAMPLED_MEAN], self._after, self._scored.std)
        return {name: values.mean(1).flatten(1) for name, values in terms.items()}

    def sum_pi_squared(self) -> Tensor:
        """Not defined for densities."""
        raise NotImplementedError("a density has no sum of squared probabilities")

    def parameters(self) -> dict[str, Tensor]:
        """`mean` and `std` [B, R, A, D] of the R noisy steps."""
        return {"mean": self._scored.mean, "std": self._scored.std}


class FlowMatching(FlowDecisions):
    """Actions on the ODE from Gaussian noise, without densities.

    The score of a column is its part of minus the flow-matching loss of the action, averaged over pairs of noise and
    time that are drawn with it: the columns of a decision sum to -mean(`cfm_loss`). It is not a log-prob.
    """

    def sample(self, noise: Tensor | None, *, greedy: bool = False) -> PolicyOutput:
        """Follow the ODE, without gradients.

        Args:
            noise: [B, `noise_width`] standard normal; None for decisions from x_1 = 0.
            greedy: start as `eval_noise` says, otherwise from the x_1 in `noise`.
        """
        noise = (self._blank if noise is None else noise).float()
        numbers, sizes = self._denoised[0] * self._denoised[1], self._denoised
        x_1, pairs = noise[:, :numbers].unflatten(1, sizes), noise[:, numbers:].unflatten(1, (MATCHED_PAIRS, -1))
        if greedy and self._settings.eval_noise == "zero":
            x_1 = torch.zeros_like(x_1)
        with torch.no_grad():
            trace = {
                "x_0": sample_ode(self.velocity, x_1, self._settings.steps),
                "pair_noise": pairs[..., :-1].unflatten(2, sizes),
                "pair_time": flow_matching_time(torch.special.ndtr(pairs[..., -1])),
            }
            return PolicyOutput(self.executed(trace["x_0"]), self.log_prob(trace), trace)

    def log_prob(self, trace: Mapping[str, Tensor]) -> Tensor:
        """[B, K]: the parts of minus the flow-matching loss."""
        actions, noise, times = trace["x_0"].unsqueeze(1), trace["pair_noise"], trace["pair_time"]
        v = self.velocity(interpolate(actions, noise, times[..., None, None]), times).float()
        errors = self.executed(v - target_velocity(actions, noise)).square().mean(1).flatten(1)
        return -errors / errors.shape[1]

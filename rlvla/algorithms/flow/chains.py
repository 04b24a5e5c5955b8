"""Sampling and scoring of chains of denoising steps, through the same step function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_mask, check_number, working_dtype
from rlvla.algorithms.choices import FLOW_METHODS, FLOW_NOISY_STEPS
from rlvla.algorithms.flow.steps import (
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
    step_distribution,
    time_grid,
)

# (x [B, R, A, D], t [B, R]) -> v [B, R, A, D], or (v, std) for the method `noise`, std broadcastable to v. The R
# evaluations of a row share its observation. The sampler calls it with R = 1.
Velocity = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FlowSampling:
    """How a decision is sampled from a flow-matching policy.

    Attributes:
        method: one of `FLOW_METHODS`, see `step_distribution`.
        steps: K, number of denoising steps.
        noisy_steps: "one": a single step per row is noisy and scored, the others are ODE steps; "all": every step is.
        std_floor: see `step_distribution`.

    Raises:
        ValueError: unknown method or mode, no steps, or a negative floor.
    """

    method: str = "sde"
    steps: int = 4
    noisy_steps: str = "one"
    std_floor: float = 0.0

    def __post_init__(self) -> None:
        """Validate."""
        if self.method not in FLOW_METHODS:
            raise ValueError(f"unknown flow method {self.method!r}; known: {', '.join(FLOW_METHODS)}")
        if self.noisy_steps not in FLOW_NOISY_STEPS:
            raise ValueError(f"noisy_steps must be one of {', '.join(FLOW_NOISY_STEPS)}, got {self.noisy_steps!r}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        check_number("std_floor", self.std_floor, low=0.0)


@dataclass(frozen=True)
class ScoredSteps:
    """Distributions of the stored steps of a chain and the log-densities of their samples.

    R is 1 if one step is noisy, K if all are.

    Attributes:
        mean: [B, R, A, D].
        std: [B, R, A, D]; 0 where an element is not random.
        log_probs: [B, R, A, D] in nats; 0 where an element is not random.
    """

    mean: Tensor
    std: Tensor
    log_probs: Tensor

    @property
    def joint_log_probs(self) -> Tensor:
        """[B, A, D]: log-density summed over the steps."""
        return self.log_probs.sum(1)

    @property
    def entropy(self) -> Tensor:
        """[B, A, D]: entropies summed over the steps."""
        return gaussian_entropy(self.std).sum(1)

    def kl(self, other: ScoredSteps) -> Tensor:
        """[B, A, D]: exact KL(self || other) of each step given where it started, summed over the steps."""
        return gaussian_kl(self.mean, self.std, other.mean, other.std).sum(1)


def noisy_step_count(method: str, steps: int) -> int:
    """Number of steps that a method makes noisy: none for `ode`, all but the last for `cps`, otherwise all."""
    if method == "ode":
        return 0
    return steps - 1 if method == "cps" else steps


def noisy_step_index(uniforms: Tensor, method: str, steps: int) -> Tensor:
    """Draw the noisy step of each row.

    Args:
        uniforms: [B] in [0, 1).
        method: one of `FLOW_METHODS`.
        steps: K.

    Returns:
        [B] int64; 0 is the first step, at t = 1.

    Raises:
        ValueError: the method has no noisy step.
    """
    count = noisy_step_count(method, steps)
    if count < 1:
        raise ValueError(
            f"the method {method} has no noisy step with steps={steps}; "
            + ("use at least 2 steps" if method == "cps" else "choose sde, cps or noise")
        )
    return (uniforms.double() * count).long().clamp(0, count - 1)


def sample_chain(
    velocity: Velocity,
    x_1: Tensor,
    noise: Tensor,
    sampling: FlowSampling,
    *,
    index: Tensor | None = None,
    mask: Tensor | None = None,
    noise_level: float | Tensor = 0.5,
) -> tuple[dict[str, Tensor], ScoredSteps]:
    """Denoise x_1 step by step and record the trace for `score_chain`.

    Args:
        velocity: see `Velocity`; called K times with R = 1.
        x_1: [B, A, D] starting points, standard normal.
        noise: standard normal; [B, A, D] for one noisy step, [B, K, A, D] for all.
        sampling: method and number of steps.
        index: [B] int64, the noisy step of each row, from `noisy_step_index`; only for one noisy step.
        mask: [B or 1, A, D] bool, elements that carry noise; the others take ODE steps. None: all.
        noise_level: a number, or one per row [B].

    Returns:
        The trace, and its score. The trace holds `before` and `after` [B, A, D] (x on both sides of the noisy step),
        `index` [B] and `x_0` [B, A, D] for one noisy step; `chain` [B, K + 1, A, D], from x_1 to x_0, for all.

    Raises:
        ValueError: shapes that do not fit, an index that is missing, superfluous or out of range, or see
            `step_distribution`.
    """
    one = sampling.noisy_steps == "one"
    _check_start(x_1)
    expected = x_1.shape if one else (x_1.shape[0], sampling.steps, *x_1.shape[1:])
    if noise.shape != expected:
        raise ValueError(f"noise has shape {list(noise.shape)}, expected {list(expected)}")
    if one != (index is not None):
        raise ValueError("index names the noisy step of each row: pass it if and only if noisy_steps is 'one'")
    if index is not None:
        _check_index(index, x_1, sampling.steps)
    step = _Step(velocity, sampling, mask, noise_level, x_1)
    chain, scored = [x_1], []
    for i in range(sampling.steps):
        position = torch.full((len(x_1), 1), i, dtype=torch.long, device=x_1.device)
        mean, std = step(chain[-1].unsqueeze(1), position, None if index is None else index == i)
        drawn = noise if one else noise[:, i]
        chain.append((mean + std * drawn.unsqueeze(1).to(mean)).squeeze(1).to(x_1))
        scored.append((mean, std))
    stacked = torch.stack(chain, 1)
    means, stds = torch.cat([m for m, _ in scored], 1), torch.cat([s for _, s in scored], 1)
    if index is None:
        return {"chain": stacked}, _scored(stacked[:, 1:], means, stds)
    rows = torch.arange(len(x_1), device=x_1.device)
    trace = {
        "before": stacked[rows, index],
        "after": stacked[rows, index + 1],
        "index": index,
        "x_0": chain[-1],
    }
    return trace, _scored(trace["after"].unsqueeze(1), means[rows, index, None], stds[rows, index, None])


def score_chain(
    velocity: Velocity,
    trace: Mapping[str, Tensor],
    sampling: FlowSampling,
    *,
    mask: Tensor | None = None,
    noise_level: float | Tensor = 0.5,
) -> ScoredSteps:
    """Log-densities of sampled chains under the current velocity; equal to the recorded ones if unchanged.

    Args:
        velocity: see `Velocity`; called once, with R = 1 for one noisy step and R = K for all.
        trace: from `sample_chain`.
        sampling: as in sampling.
        mask: as in sampling.
        noise_level: as in sampling.

    Returns:
        Differentiable in the velocity.

    Raises:
        ValueError: a trace of the other mode or another number of steps, or see `sample_chain`.
    """
    names = ("before", "after", "index") if sampling.noisy_steps == "one" else ("chain",)
    missing = [name for name in names if name not in trace]
    if missing:
        raise ValueError(
            f"the trace lacks {', '.join(missing)}: chains with noisy_steps={sampling.noisy_steps!r} hold "
            f"{', '.join(names)}; score them as they were sampled"
        )
    if sampling.noisy_steps == "one":
        before, after = trace["before"].unsqueeze(1), trace["after"].unsqueeze(1)
        _check_start(trace["before"])
        _check_index(trace["index"], trace["before"], sampling.steps)
        positions = trace["index"].unsqueeze(1)
    else:
        chain = trace["chain"]
        if chain.dim() != 4 or chain.shape[1] != sampling.steps + 1:
            raise ValueError(
                f"chain has shape {list(chain.shape)}, expected [B, steps + 1 = {sampling.steps + 1}, A, D]"
            )
        before, after = chain[:, :-1], chain[:, 1:]
        positions = torch.arange(sampling.steps, device=chain.device).expand(len(chain), -1)
    step = _Step(velocity, sampling, mask, noise_level, before[:, 0])
    return _scored(after, *step(before, positions))


def sample_ode(velocity: Velocity, x_1: Tensor, steps: int) -> Tensor:
    """The action that the ODE reaches from x_1 in a number of Euler steps.

    Args:
        velocity: see `Velocity`; called `steps` times with R = 1.
        x_1: [B, A, D].
        steps: K.

    Returns:
        [B, A, D].

    Raises:
        ValueError: see `sample_chain`.
    """
    noise = torch.zeros_like(x_1).unsqueeze(1).expand(-1, max(steps, 1), -1, -1)
    trace, _ = sample_chain(velocity, x_1, noise, FlowSampling("ode", steps, "all"))
    return trace["chain"][:, -1]


class _Step:
    """The step distribution that sampler and scorer share.

    Args:
        velocity: see `Velocity`.
        sampling: method and number of steps.
        mask: [B or 1, A, D] bool, or None.
        noise_level: a number, or [B].
        like: [B, A, D], for shapes, dtype and device.
    """

    def __init__(
        self,
        velocity: Velocity,
        sampling: FlowSampling,
        mask: Tensor | None,
        noise_level: float | Tensor,
        like: Tensor,
    ):
        if mask is not None:
            check_mask(mask, "mask")
            if mask.shape[1:] != like.shape[1:] or mask.shape[0] not in (1, len(like)):
                raise ValueError(
                    f"mask has shape {list(mask.shape)}, expected [{len(like)} or 1, {like.shape[1]}, {like.shape[2]}]"
                )
        if isinstance(noise_level, Tensor) and noise_level.dim():
            if noise_level.shape != like.shape[:1]:
                raise ValueError(f"noise_level has shape {list(noise_level.shape)}, expected [{len(like)}] or a number")
            noise_level = noise_level.view(-1, 1, 1, 1)
        self._velocity, self._sampling, self._mask, self._level = velocity, sampling, mask, noise_level
        self._times = time_grid(sampling.steps, dtype=working_dtype(like), device=like.device)

    def __call__(self, x: Tensor, positions: Tensor, noisy: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [B, R, A, D] of the steps at positions [B, R] in the grid; noisy: [B] bool."""
        t = self._times[positions]
        v, std = self._evaluate(x, t)
        t, d = t[..., None, None], 1.0 / self._sampling.steps
        method = self._sampling.method
        mean, deviation = step_distribution(
            x,
            v,
            t,
            d,
            method=method,
            noise_level=self._level,
            std=std,
            std_floor=self._sampling.std_floor,
        )
        random = self._random(noisy)
        if random is None:
            return mean, deviation
        straight = step_distribution(x, v, t, d, method="ode")[0]
        return torch.where(random, mean, straight), torch.where(random, deviation, torch.zeros_like(deviation))

    def _evaluate(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        output = self._velocity(x, t)
        v, std = output if isinstance(output, tuple) else (output, None)
        if v.shape != x.shape:
            raise ValueError(f"velocity returned shape {list(v.shape)} for x of shape {list(x.shape)}")
        if self._sampling.method != "noise":
            return v, None
        if std is None:
            raise ValueError("the method noise needs a velocity that returns the pair (v, std)")
        return v, std

    def _random(self, noisy: Tensor | None) -> Tensor | None:
        """Which elements carry noise, broadcastable to [B, R, A, D]; None: all."""
        mask = None if self._mask is None else self._mask.unsqueeze(1)
        if noisy is None:
            return mask
        noisy = noisy.view(-1, 1, 1, 1)
        return noisy if mask is None else mask & noisy


def _scored(x_next: Tensor, mean: Tensor, std: Tensor) -> ScoredSteps:
    return ScoredSteps(mean, std, gaussian_log_prob(x_next, mean, std))


def _check_start(x: Tensor) -> None:
    if x.dim() != 3:
        raise ValueError(f"a chain starts from [B, A, D], got {list(x.shape)}")


def _check_index(index: Tensor, x: Tensor, steps: int) -> None:
    """Require [B] int64 and, on the CPU, values within the chain."""
    if index.shape != x.shape[:1] or index.dtype != torch.int64:
        raise ValueError(f"index must be [{len(x)}] int64, got {list(index.shape)} {index.dtype}")
    if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < steps:
        raise ValueError(f"index must lie in [0, {steps - 1}], got {int(index.min())} to {int(index.max())}")

"""The action head of flow-matching policies; it has no weights, which are those of the velocity network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlvla.algorithms.flow import flow_matching_time, interpolate, predict_action, target_velocity
from rlvla.models.action_heads import CORRECT_WITHIN, ActionCodec
from rlvla.models.flow.distribution import FlowDistribution, noise_width
from rlvla.models.flow.settings import FlowSettings
from rlvla.models.policy import TRAINING_NOISE, PolicyOutput


class VelocityModel(Protocol):
    """A network whose hidden states condition a velocity."""

    def read_out(self, hidden: Tensor) -> Any:
        """The condition of `velocity`, computed once per decision."""
        ...

    def velocity(self, condition: Any, x: Tensor, t: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x [B, R, A, D], t [B, R] -> velocity, and standard deviation if it is learned, [B, R, A, D]."""
        ...


class FlowHead:
    """Actions from a chain of denoising steps.

    Args:
        codec: normalizes actions.
        settings: how actions are sampled.
        chunk: (A, D).
        pairs: (noise, time) pairs per demonstrated chunk in the supervised loss; they share the observation's pass.
    """

    def __init__(self, codec: ActionCodec, settings: FlowSettings, chunk: tuple[int, int], pairs: int = 4):
        self._codec, self.settings, self._chunk, self._pairs = codec, settings, chunk, pairs
        self.noise_level = settings.noise_level

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """See `PolicySpec.noise_shape`."""
        return (noise_width(self.settings, self._chunk),)

    @property
    def training_noise(self) -> int:
        """See `PolicySpec.training_noise`: for each pair the noise of a chunk, and a number for its time."""
        return self._pairs * (self._chunk[0] * self._chunk[1] + 1)

    def distribution(self, model: VelocityModel, hidden: Tensor, temperature: float) -> FlowDistribution:
        """Chains of the velocity that the hidden states condition."""
        velocity = partial(model.velocity, model.read_out(hidden))
        blank = torch.zeros((len(hidden), *self.noise_shape), device=hidden.device)
        return FlowDistribution(velocity, self.settings, self._chunk, blank, temperature, self.noise_level)

    def supervised(
        self, distribution: FlowDistribution, trace: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Flow matching: squared error of the velocity at random times between noise and the demonstrated chunk.

        `correct`: the action predicted from there is close to the demonstrated one. Without random numbers in `trace`,
        as when held-out rows are measured, a fixed grid of times and fixed noise take their place.
        """
        actions = trace["actions"].float().unsqueeze(1)  # [B, 1, A, D]
        noise, uniforms = self._pairs_of(trace)
        times = flow_matching_time(uniforms)
        t = times[..., None, None]
        x = interpolate(actions, noise, t)
        v = distribution.velocity(x, times).float()
        loss = (v - target_velocity(actions, noise)).square().mean(1).flatten(1)
        distance = (predict_action(x, v.detach(), t) - actions).abs()
        correct = (distance < CORRECT_WITHIN).float().mean(1).flatten(1)
        return {"loss": loss, "error": loss.detach(), "correct": correct}

    def _pairs_of(self, trace: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Noise [B, pairs, A, D] and uniforms [B, pairs]."""
        actions = trace["actions"]
        if TRAINING_NOISE in trace:
            numbers = trace[TRAINING_NOISE].float().unflatten(1, (self._pairs, -1))
            return numbers[..., :-1].unflatten(2, self._chunk), torch.special.ndtr(numbers[..., -1])
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((1, self._pairs, *self._chunk), generator=generator).to(actions.device)
        uniforms = (torch.arange(self._pairs, device=actions.device) + 0.5) / self._pairs
        return noise.expand(len(actions), -1, -1, -1), uniforms.expand(len(actions), -1)

    def environment_actions(self, output: PolicyOutput) -> np.ndarray:
        """Unnormalized actions; clipping is left to the environment."""
        assert output.actions is not None
        return self._codec.unnormalize_actions(output.actions.cpu().numpy())

    def encode(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """`actions` [..., A, D] float32, normalized."""
        return {"actions": self._codec.normalize_actions(actions)}

    @property
    def effective_columns(self) -> Tensor:
        """See `StatisticsCodec.effective_numbers`."""
        return self._codec.effective_numbers

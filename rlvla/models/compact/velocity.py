"""The velocity of the compact flow policy: a small residual network on noisy actions, time and the observation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rlvla.algorithms.flow import learned_std
from rlvla.models.compact.config import CompactConfig

_TIME_WIDTH = 32
_LOWEST, _HIGHEST = 0.5, 64.0  # angular frequencies of the time embedding, per unit of time
_BLOCKS = 2


class VelocityNetwork(nn.Module):
    """Velocity and standard deviation of a noisy chunk; the condition is computed once per decision.

    Args:
        config: sizes.
    """

    def __init__(self, config: CompactConfig):
        super().__init__()
        self.config = config
        width, columns = config.width, config.columns
        self.condition = nn.Linear(columns * config.column_width, width)
        self.actions = nn.Linear(columns + _TIME_WIDTH, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(_BLOCKS)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, columns)
        self.std = nn.Linear(width, columns) if config.flow.learns_std else None
        if self.std is not None:  # may be added to a policy that was trained without it
            nn.init.zeros_(self.std.weight)
            nn.init.zeros_(self.std.bias)
        frequencies = torch.linspace(math.log(_LOWEST), math.log(_HIGHEST), _TIME_WIDTH // 2).exp()
        self.register_buffer("frequencies", frequencies, persistent=False)

    def initialize(self) -> None:
        """Random weights from the global generator; velocity and standard deviation do not depend on anything yet."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()
        for layer in (self.output, self.std):
            if layer is not None:
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, condition: Tensor, x: Tensor, t: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Velocity, and the standard deviation if it is learned, both [B, R, A, D].

        Args:
            condition: [B, width], from the observation.
            x: [B, R, A, D] noisy actions, R per decision.
            t: [B, R] their times.
        """
        angles = t.to(condition.dtype)[..., None] * self.frequencies.to(condition.dtype)
        time = torch.cat([angles.sin(), angles.cos()], -1)
        inputs = torch.cat([x.to(condition.dtype).flatten(2), time], -1)
        hidden = self.actions(inputs) + condition[:, None]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = torch.relu(self.norm(hidden))
        velocity = self.output(hidden).view_as(x).float()
        return velocity if self.std is None else (velocity, learned_std(self.std(hidden).view_as(x).float()))

"""A head of one's own: Gaussians of constant width around bounded means (`--compact_head bounded_gaussian`)."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from rlvla.models.compact.heads import CompactHead, register_compact_head
from rlvla.options import arg


@dataclass(frozen=True)
class BoundedGaussianOptions:
    mean_bound: float = arg(1.0, "largest magnitude of a mean, in normalized actions", above=0)
    constant_std: float = arg(0.1, "standard deviation, in normalized actions", above=0)


@register_compact_head("bounded_gaussian", options=BoundedGaussianOptions)
class BoundedGaussian(CompactHead):
    def layers(self):
        return {"read_out_layer": nn.Linear(self.config.column_width, 1)}

    def initialize(self, policy, seed):
        policy.read_out_layer.reset_parameters()

    def read_out(self, policy, hidden):
        options, raw = self.config.head, policy.read_out_layer(hidden).view(len(hidden), *policy.spec.noise_shape)
        return options.mean_bound * torch.tanh(raw), torch.full_like(raw, math.log(options.constant_std))

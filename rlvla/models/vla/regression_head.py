"""The L1 regression head of OpenVLA-OFT (arXiv 2502.19645), and the standard deviation of its actions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rlvla.models.vla.choices import MAX_STD, MIN_STD

NUM_BLOCKS = 2


class ResidualBlock(nn.Module):
    """Layer norm, linear layer and ReLU with a skip connection; names as in OFT's `MLPResNetBlock`."""

    def __init__(self, dim: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return x + self.ffn(x)


class OutputLayer(nn.Linear):
    """Linear layer in float32: the rounding error of bfloat16 actions can be as large as a standard deviation."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_dim] -> [..., output_dim] float32."""
        return nn.functional.linear(x.float(), self.weight.float(), self.bias.float())


class ResidualMLP(nn.Module):
    """Residual MLP; names as in OFT's `MLPResNet`."""

    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_dim)
        self.fc1 = nn.Linear(input_dim, hidden_dim)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(hidden_dim) for _ in range(NUM_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(hidden_dim)
        self.fc2 = OutputLayer(hidden_dim, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., input_dim] -> [..., output_dim]."""
        x = torch.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class RegressionHead(nn.Module):
    """Normalized actions from the hidden states at the action positions; OFT's `L1RegressionActionHead`.

    Each action is predicted from its D hidden states only.

    Args:
        llm_dim: d, width of the decoder and of the head.
        action_dim: D, dimensions of an action.
    """

    def __init__(self, llm_dim: int, action_dim: int):
        super().__init__()
        self.action_dim = action_dim
        self.model = ResidualMLP(action_dim * llm_dim, llm_dim, action_dim)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Xavier weights and zero biases; the last layer is scaled by 0.1 so that actions start near 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                module.bias.zero_()
        self.model.fc2.weight.mul_(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, A*D, d] -> [B, A, D]."""
        actions = hidden.shape[1] // self.action_dim
        return self.model(hidden.reshape(len(hidden), actions, -1))


class ActionStd(nn.Module):
    """Logarithm of the standard deviation of normalized actions, clamped to log `MIN_STD` and log `MAX_STD`.

    Args:
        kind: "learned" (a parameter per dimension), "features" (plus a zero-initialized linear layer on the hidden
            states) or "fixed" (nothing is trained).
        llm_dim: d, width of the decoder.
        action_dim: D, dimensions of an action.
        init: initial standard deviation.
    """

    def __init__(self, kind: str, llm_dim: int, action_dim: int, init: float):
        super().__init__()
        log_std = torch.full((action_dim,), math.log(init))
        if kind == "fixed":
            self.register_buffer("log_std", log_std)
        else:
            self.log_std = nn.Parameter(log_std)
        self.weight = nn.Parameter(torch.zeros(action_dim, llm_dim)) if kind == "features" else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, A*D, d] -> [D], or [B, A, D] if it depends on the features."""
        log_std = self.log_std.float()
        if self.weight is not None:
            features = hidden.unflatten(1, (-1, len(log_std)))  # [B, A, D, d]
            log_std = log_std + (features.float() * self.weight.float()).sum(-1)
        return log_std.clamp(math.log(MIN_STD), math.log(MAX_STD))

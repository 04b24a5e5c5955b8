"""An ensemble of Q-networks, evaluated together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, relu

INITIALISATIONS = ("default", "orthogonal")


class CriticEnsemble(nn.Module):
    """M independent critics Q(s, a): MLPs with LayerNorm and ReLU after each hidden layer (RLPD, Ball et al. 2023).

    LayerNorm bounds the values of actions that are not in the data. A layer of all critics is one batched product.

    Args:
        input_dim: F, features of state and action together.
        hidden_sizes: width of each hidden layer.
        n_critics: M.
        init: "default" (that of `nn.Linear`) or "orthogonal" (gain sqrt(2), output 1, biases 0).
        generator: of the initial weights.

    Raises:
        ValueError: a size that is not positive, or unknown init.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_sizes: Sequence[int] = (256, 256),
        n_critics: int = 10,
        *,
        init: str = "default",
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        sizes = [input_dim, *hidden_sizes, 1]
        if min(*sizes, n_critics) < 1:
            raise ValueError(f"input {input_dim}, hidden {list(hidden_sizes)} and {n_critics} critics must be positive")
        if init not in INITIALISATIONS:
            raise ValueError(f"unknown initialisation {init!r}; known: {', '.join(INITIALISATIONS)}")
        self.n_critics = n_critics
        linears = [EnsembleLinear(n_critics, i, o) for i, o in zip(sizes, sizes[1:])]
        for number, linear in enumerate(linears):
            linear.initialise(init, 2.0**0.5 if number < len(hidden_sizes) else 1.0, generator)
        self.linears = nn.ModuleList(linears)
        self.norms = nn.ModuleList(EnsembleLayerNorm(n_critics, size) for size in hidden_sizes)

    def forward(self, inputs: Tensor, critics: Tensor | None = None) -> Tensor:
        """Values of all critics, or of those whose indices are given.

        Args:
            inputs: [..., F], the same for all critics; computed in the dtype of the weights, also under autocast.
            critics: [m] int64, see `rlvla.algorithms.off_policy.random_critics`; the others are not evaluated.

        Returns:
            [M, ...] or [m, ...].
        """
        rows = inputs.reshape(-1, inputs.shape[-1]).to(next(self.parameters()).dtype)
        count = self.n_critics if critics is None else len(critics)
        with torch.autocast(inputs.device.type, enabled=False):
            x = rows.expand(count, *rows.shape)
            for linear, norm in zip(self.linears, self.norms):
                x = relu(norm(linear(x, critics), critics))
            return self.linears[-1](x, critics).reshape(count, *inputs.shape[:-1])


class EnsembleLinear(nn.Module):
    """M linear layers; weight [M, inputs, outputs], bias [M, 1, outputs], both uninitialised."""

    def __init__(self, members: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs))

    @torch.no_grad()
    def initialise(self, init: str, gain: float, generator: torch.Generator | None) -> None:
        """See `CriticEnsemble`; each member draws its own weights, `gain` is that of "orthogonal"."""
        if init == "orthogonal":
            for weight in self.weight:
                nn.init.orthogonal_(weight, gain, generator)
            nn.init.zeros_(self.bias)
            return
        bound = self.weight.shape[1] ** -0.5
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound, generator)

    def forward(self, x: Tensor, members: Tensor | None) -> Tensor:
        """[m, N, inputs] -> [m, N, outputs]."""
        return torch.baddbmm(_of(self.bias, members), x, _of(self.weight, members))


class EnsembleLayerNorm(nn.Module):
    """M layer norms over the last dimension, each with its own scale and shift."""

    def __init__(self, members: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, size))
        self.bias = nn.Parameter(torch.zeros(members, 1, size))

    def forward(self, x: Tensor, members: Tensor | None) -> Tensor:
        """[m, N, size] -> the same."""
        normalised = layer_norm(x, x.shape[-1:])
        return torch.addcmul(_of(self.bias, members), normalised, _of(self.weight, members))


def _of(parameter: Tensor, members: Tensor | None) -> Tensor:
    return parameter if members is None else parameter[members]

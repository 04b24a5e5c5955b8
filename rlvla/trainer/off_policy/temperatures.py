"""The temperatures of the entropy, adapted to its targets."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_BETAS, _EPS = (0.9, 0.999), 1e-8


class Temperatures:
    """Temperatures alpha = exp(log alpha), each raised while its entropy is below its target (Adam on log alpha).

    Equal on all ranks as long as they are given the same gaps.

    Args:
        initial: name -> temperature at the start.
        learning_rate: 0 keeps them.
    """

    def __init__(self, initial: Mapping[str, float], learning_rate: float):
        self._names, self._rate = tuple(initial), learning_rate
        self._log = torch.tensor([math.log(value) for value in initial.values()], dtype=torch.float64)
        self._first, self._second = torch.zeros_like(self._log), torch.zeros_like(self._log)
        self._steps = torch.zeros((), dtype=torch.float64)

    def __getitem__(self, name: str) -> float:
        """The temperature of this name."""
        return float(self._log[self._names.index(name)].exp())

    def values(self) -> dict[str, float]:
        """All temperatures by name."""
        return {name: self[name] for name in self._names}

    def step(self, gaps: Mapping[str, float]) -> None:
        """One step from the mean of (entropy - target) for each, the gradient of `temperature_loss`."""
        gradient = torch.tensor([gaps[name] for name in self._names], dtype=torch.float64)
        self._steps += 1
        self._first.lerp_(gradient, 1 - _BETAS[0])
        self._second.lerp_(gradient.square(), 1 - _BETAS[1])
        scale = (self._second / (1 - _BETAS[1] ** self._steps)).sqrt() + _EPS
        self._log -= self._rate * self._first / (1 - _BETAS[0] ** self._steps) / scale

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name."""
        return {"log": self._log, "first": self._first, "second": self._second, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state_dict`."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])

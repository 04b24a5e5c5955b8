"""Running normalization of the critic's targets, and of its input if that is a state vector."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_same_shape
from rlvla.algorithms.masking import all_reduce_sum, masked_sum

_MIN_STD = 0.02  # numbers that hardly change at first, such as the height of an object, may change later
_MAX_STATE = 10.0  # after normalization


class ValueNormalizer:
    """Normalizes returns by their running mean and standard deviation; the value head is not rescaled.

    The critic is trained on `normalize(returns)`; its predictions are `denormalize(values)`.

    Args:
        epsilon: lower bound of the standard deviation.
    """

    def __init__(self, epsilon: float = 1e-4):
        if not epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {epsilon}")
        self.epsilon = epsilon
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0  # sum of squared distances from the mean

    @property
    def std(self) -> float:
        """Standard deviation (ddof 0) of all returns so far; 1 with fewer than two."""
        if self.count < 2:
            return 1.0
        return max((self.squares / self.count) ** 0.5, self.epsilon)

    @torch.no_grad()
    def update(self, returns: Tensor, mask: Tensor, process_group: Any = None) -> None:
        """Update the statistics with the valid returns of a batch (Chan et al. 1979).

        Args:
            returns: [B, T].
            mask: [B, T] bool.
            process_group: the returns of all ranks are used, see `masking.all_reduce_sum`.

        Raises:
            ValueError: shapes differ or mask not bool.
        """
        check_same_shape(mask, "mask", returns=returns)
        wide = returns.to(torch.float64)
        count = float(all_reduce_sum(mask.sum(), process_group))
        if count == 0:
            return
        mean = float(all_reduce_sum(masked_sum(wide, mask), process_group)) / count
        squares = float(all_reduce_sum(masked_sum((wide - mean).square(), mask), process_group))
        shift, total = mean - self.mean, self.count + count
        self.squares += squares + shift * shift * self.count * count / total
        self.mean += shift * count / total
        self.count = total

    def normalize(self, returns: Tensor) -> Tensor:
        """(returns - mean) / std, any shape."""
        return (returns - self.mean) / self.std

    def denormalize(self, values: Tensor) -> Tensor:
        """Values * std + mean, any shape."""
        return values * self.std + self.mean

    def state_dict(self) -> dict[str, float]:
        """State to be saved in a checkpoint."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`."""
        self.count, self.mean, self.squares = float(state["count"]), float(state["mean"]), float(state["squares"])


class StateNormalizer:
    """Normalizes each number of a state by its running mean and standard deviation, and clips it to +-10.

    Args:
        width: C, numbers of a state.
    """

    def __init__(self, width: int):
        self.width, self.count = width, 0.0
        self.mean = torch.zeros(width, dtype=torch.float64)
        self.squares = torch.zeros(width, dtype=torch.float64)  # sums of squared distances from the mean

    @torch.no_grad()
    def update(self, states: Tensor, process_group: Any = None) -> None:
        """Update the statistics with states [N, C] (Chan et al. 1979); arguments as in `ValueNormalizer.update`."""
        wide = states.to(torch.float64)
        count = float(all_reduce_sum(torch.tensor(float(len(wide)), device=wide.device), process_group))
        mean = all_reduce_sum(wide.sum(0), process_group) / count
        squares = all_reduce_sum((wide - mean).square().sum(0), process_group)
        shift, total = mean.cpu() - self.mean, self.count + count
        self.squares += squares.cpu() + shift.square() * (self.count * count / total)
        self.mean += shift * (count / total)
        self.count = total

    def __call__(self, states: Tensor) -> Tensor:
        """Normalized states [N, C] float32."""
        std = (self.squares / max(self.count, 1.0)).sqrt().clamp(min=_MIN_STD)
        return ((states - self.mean) / std).clamp(-_MAX_STATE, _MAX_STATE).float()

    def state_dict(self) -> dict[str, Any]:
        """State to be saved in a checkpoint."""
        return {"count": self.count, "mean": self.mean.tolist(), "squares": self.squares.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.count = float(state["count"])
        self.mean = torch.tensor(state["mean"], dtype=torch.float64)
        self.squares = torch.tensor(state["squares"], dtype=torch.float64)

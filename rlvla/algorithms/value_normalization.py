"""Running normalization of the critic's targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_same_shape
from rlvla.algorithms.masking import all_reduce_sum, masked_sum


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

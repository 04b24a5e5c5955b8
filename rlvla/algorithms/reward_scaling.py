"""Reward scaling by the running standard deviation of scores, and reward clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.value_normalization import ValueNormalizer

_SMALLEST_STD = 1e-6  # below it scores differ by rounding only


class RewardScaling:
    """Divides rewards by the running standard deviation of the episodes' scores, then clips each one.

    Rewards are not shifted, so that an episode without reward stays at 0 and its length does not matter.

    Args:
        normalize: whether to divide; otherwise rewards are only clipped.
        clip: (low, high) of each step's reward, after the division; None: no clipping.
    """

    def __init__(self, normalize: bool = False, clip: tuple[float, float] | None = None):
        if clip is not None and not clip[0] < clip[1]:
            raise ValueError(f"clip must be (low, high) with low < high, got {clip}")
        self._normalize, self._clip = normalize, clip
        self._moments = ValueNormalizer()

    @property
    def active(self) -> bool:
        """Whether rewards are changed at all."""
        return self._normalize or self._clip is not None

    @property
    def divisor(self) -> float:
        """Standard deviation (ddof 0) of all scores so far; 1 while they are all equal."""
        moments = self._moments
        std = (moments.squares / moments.count) ** 0.5 if moments.count else 0.0
        return std if self._normalize and std > _SMALLEST_STD else 1.0

    def update(self, scores: Tensor, process_group: Any = None) -> None:
        """Update the standard deviation with the scores [N] of the episodes of all ranks; N may be 0.

        Args:
            scores: sum of the rewards of each episode.
            process_group: see `masking.all_reduce_sum`.
        """
        if self._normalize:
            self._moments.update(scores[None], torch.ones_like(scores[None], dtype=torch.bool), process_group)

    def __call__(self, rewards: Tensor, executed: Tensor) -> Tensor:
        """The rewards [S, A] to train on; 0 where the mask `executed` [S, A] is not set."""
        scaled = rewards / self.divisor
        if self._clip is not None:
            scaled = scaled.clamp(*self._clip)
        return torch.where(executed, scaled, torch.zeros_like(scaled))

    def state_dict(self) -> dict[str, float]:
        """State to be saved in a checkpoint."""
        return self._moments.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`."""
        self._moments.load_state_dict(state)

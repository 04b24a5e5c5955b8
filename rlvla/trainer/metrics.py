"""Averages over micro-batches and ranks, weighted by what each average is over."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from rlvla.utils.strategy import DeepspeedStrategy


class MetricMeans:
    """Weighted means. A metric that is a mean over tokens is added with the number of tokens as its weight."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._weights: defaultdict[str, float] = defaultdict(float)

    def add(self, metrics: dict[str, Any], weight: float) -> None:
        """Add values (numbers or scalar tensors); a weight of 0 only declares the names."""
        for name, value in metrics.items():
            self._weights[name] += weight
            self._sums[name] += (
                float(value.detach() if isinstance(value, torch.Tensor) else value) * weight if weight else 0
            )

    def reduce(self, strategy: DeepspeedStrategy) -> dict[str, float]:
        """The means over everything added on any rank; every rank must have added the same names."""
        sums = strategy.all_reduce(dict(self._sums), "sum")
        weights = strategy.all_reduce(dict(self._weights), "sum")
        return {name: sums[name] / weights[name] for name in sums if weights[name]}

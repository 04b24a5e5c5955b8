"""The ways in which LeRobot policies normalize states and actions, and their inverses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlvla.models.lerobot.features import STATISTICS

EPSILON = 1e-8


@dataclass(frozen=True)
class Normalizer:
    """Normalizes vectors of one feature.

    MEAN_STD gives (x - mean) / (std + eps); MIN_MAX, QUANTILES and QUANTILE10 map the range between two statistics to
    [-1, 1], with a range of zero replaced by eps; IDENTITY changes nothing.

    Attributes:
        mode: a key of `STATISTICS`.
        statistics: the float32 vectors that the mode needs, by name.
        eps: guards against division by zero.
    """

    mode: str
    statistics: Mapping[str, np.ndarray]
    eps: float = EPSILON

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """[..., n] in units of the environment -> [..., n] float32 in those of the network."""
        values = np.asarray(values, np.float32)
        if self.mode == "IDENTITY":
            return values
        first, second = self._pair()
        if self.mode == "MEAN_STD":
            return (values - first) / (second + np.float32(self.eps))
        return 2 * (values - first) / self._range(first, second) - 1

    def unnormalize(self, values: np.ndarray) -> np.ndarray:
        """The inverse of `normalize`; as in LeRobot, MEAN_STD multiplies by std without eps."""
        values = np.asarray(values, np.float32)
        if self.mode == "IDENTITY":
            return values
        first, second = self._pair()
        if self.mode == "MEAN_STD":
            return values * second + first
        return (values + 1) / 2 * self._range(first, second) + first

    def _pair(self) -> tuple[np.ndarray, np.ndarray]:
        first, second = STATISTICS[self.mode]
        return self.statistics[first], self.statistics[second]

    def _range(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.where(high == low, np.float32(self.eps), high - low)


def normalizer_problems(mode: str, statistics: Mapping[str, np.ndarray] | None, size: int) -> list[str]:
    """Why a mode cannot be used with these statistics of a vector of `size` numbers, in words."""
    needed = STATISTICS[mode]
    missing = [name for name in needed if name not in (statistics or {})]
    if missing:
        return [f"{' and '.join(missing)} missing, which {mode} needs"]
    problems = []
    for name in needed:
        values = (statistics or {})[name]
        if values.shape != (size,):
            problems.append(f"{name} has shape {list(values.shape)}, not [{size}]")
        elif not np.isfinite(values).all():
            problems.append(f"{name} has values that are not finite; the policy was saved without its statistics")
    return problems

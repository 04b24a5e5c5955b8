"""Returns, advantages and labels of advantage-conditioned training (RECAP).

Physical Intelligence 2025, arXiv 2511.14759. Returns count environment steps: -1 for each step until the episode ends,
and a failure costs `failure_cost` x `longest` more. Divided by (1 + `failure_cost`) x `longest`, the longest episode of
the task, they lie in [-1, 0]: above -1 / (1 + `failure_cost`) in successful episodes. A value is the mean of a
categorical distribution over `BINS` returns.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BINS = 201
_STD = 0.0165  # of a smoothed label, about 3 bins
_MARGIN = 0.05  # about 3 standard deviations, so that labels near -1 and 0 keep their mean


@dataclass(frozen=True)
class ReturnScale:
    """Normalization of the returns of a task.

    Attributes:
        longest: steps of the longest episode of the task.
        failure_cost: cost of a failure, in units of `longest`.
    """

    longest: int
    failure_cost: float

    @property
    def step(self) -> float:
        """Normalized cost of an environment step."""
        return 1.0 / ((1.0 + self.failure_cost) * self.longest)

    def end(self, success: bool) -> float:
        """Normalized return after the last step of an episode."""
        return 0.0 if success else -self.failure_cost / (1.0 + self.failure_cost)

    def returns(self, steps: np.ndarray, length: int, success: bool) -> np.ndarray:
        """Normalized returns [S] float64 in [-1, 0] from these steps of an episode of `length` steps."""
        return np.maximum(self.end(success) - self.step * (length - steps), -1.0)

    def advantages(self, values: np.ndarray, steps: np.ndarray, length: int, success: bool, horizon: int) -> np.ndarray:
        """A_t = sum of the normalized rewards of n steps + V(o_{t+n}) - V(o_t), [S] float64.

        n reaches to the first observation at least `horizon` steps later, or to the end of the episode, whose return
        takes the place of a value.

        Args:
            values: [S], of the observations.
            steps: [S], environment steps at which they were made, increasing.
            length: environment steps of the episode.
            success: whether it ended in success.
            horizon: look-ahead in environment steps.
        """
        later, rewards = self.rewards_until(steps, length, horizon)
        return np.append(values, self.end(success))[later] + rewards - values

    def rewards_until(self, steps: np.ndarray, length: int, horizon: int) -> tuple[np.ndarray, np.ndarray]:
        """For each observation the first one at least `horizon` steps later, and the normalized rewards until then.

        Returns:
            [S] int64, S where the episode ends before; and [S] float64, without the return of its outcome.
        """
        later = np.searchsorted(steps, steps + horizon)
        return later, -self.step * (np.append(steps, length)[later] - steps)


def bin_centers() -> Tensor:
    """[`BINS`] float64: the returns of the bins; they exceed [-1, 0] by the width of a smoothed label."""
    return torch.linspace(-1.0 - _MARGIN, _MARGIN, BINS, dtype=torch.float64)


def smoothed_histogram(returns: Tensor) -> Tensor:
    """[M] in [-1, 0] -> [M, `BINS`] float32: a Gaussian around each return, integrated over the bins (HL-Gauss).

    Imani and White 2018; it learns faster than two bins per return (Farebrother et al. 2024), and has the same mean.
    """
    width = (1.0 + 2 * _MARGIN) / (BINS - 1)
    edges = torch.cat([bin_centers() - width / 2, bin_centers()[-1:] + width / 2])
    cumulative = torch.special.ndtr((edges - returns.double()[:, None]) / _STD)
    probabilities = cumulative.diff()
    return (probabilities / probabilities.sum(1, keepdim=True)).float()


def expected_return(logits: Tensor) -> Tensor:
    """[M, `BINS`] -> [M] float32 in [-1, 0]: the mean of the categorical distribution."""
    return (torch.softmax(logits.float(), -1) @ bin_centers().float().to(logits.device)).clamp(-1.0, 0.0)


def positive_labels(advantages: np.ndarray, tasks: Sequence[Hashable], share: float) -> np.ndarray:
    """[M] bool: whether an advantage is at least the threshold of its task, which `share` of the task's rows reach.

    Args:
        advantages: [M].
        tasks: [M], the task of each row.
        share: fraction of positive rows in (0, 1]; rounded to whole rows, at least one. Rows with equal advantages
            have the same label.
    """
    labels = np.zeros(len(advantages), bool)
    for task in set(tasks):
        rows = np.array([other == task for other in tasks])
        count = max(1, round(share * int(rows.sum())))
        labels[rows] = advantages[rows] >= np.sort(advantages[rows])[-count]
    return labels

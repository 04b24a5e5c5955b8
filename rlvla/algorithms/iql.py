"""Implicit Q-learning and advantage-weighted regression.

Kostrikov et al. 2021, arXiv 2110.06169; Peng et al. 2019, arXiv 1910.00177. Undiscounted rewards,
normalized by `rlvla.algorithms.recap.ReturnScale` to returns in [-1, 0]; an action is the chunk of a decision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_EQUAL = 1e-9  # standard deviation of advantages that differ by rounding alone


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """|expectile - 1(error < 0)| error^2, elementwise; `errors` are targets minus values.

    Its minimum is the mean of the targets at 0.5, and tends to their maximum at 1.
    """
    return torch.where(errors < 0, 1.0 - expectile, expectile) * errors.square()


def td_targets(rewards: Tensor, next_values: Tensor, bootstraps: Tensor) -> Tensor:
    """[M]: rewards until the next decision plus the state value there, which is clamped to the range of returns.

    Args:
        rewards: [M], up to the next decision; the return of the outcome is among them where the episode ends before.
        next_values: [M], V(s') of the next decision.
        bootstraps: [M] bool, whether there is a next decision.
    """
    return rewards + torch.where(bootstraps, next_values.clamp(-1.0, 0.0), 0.0)


def iql_loss(values: Tensor, action_values: Tensor, target_values: Tensor, targets: Tensor, expectile: float) -> Tensor:
    """[M]: expectile loss of V towards the smaller target Q, plus the squared errors of both Q.

    Args:
        values: [M], V(s).
        action_values: [M, 2], Q1(s, a) and Q2(s, a).
        target_values: [M, 2], of the target networks.
        targets: [M], `td_targets`.
        expectile: in (0, 1).
    """
    smallest = target_values.detach().amin(1)
    errors = action_values - targets.detach()[:, None]
    return expectile_loss(smallest - values, expectile) + errors.square().sum(1)


@dataclass(frozen=True)
class RowWeights:
    """Weights of advantage-weighted regression.

    Attributes:
        weights: [M] float64 of mean 1.
        clipped: fraction of rows whose weight was clipped.
    """

    weights: np.ndarray
    clipped: float

    @property
    def effective(self) -> float:
        """Effective sample size as a fraction of the rows, (sum w)^2 / (M sum w^2)."""
        return float(self.weights.sum() ** 2 / (len(self.weights) * np.square(self.weights).sum()))


def awr_weights(advantages: np.ndarray, temperature: float, max_weight: float) -> RowWeights:
    """Weights w = min(exp(temperature x standardized advantage), `max_weight`), divided by their mean.

    Advantages are standardized over all rows. Their standard deviation makes a temperature mean the same for tasks of
    any length. Their mean would cancel but for `max_weight`; subtracted, a constant error of V, as of a high expectile,
    does not decide how many weights are clipped. Where all advantages are equal, weights are 1.

    Args:
        advantages: [M].
        temperature: the inverse temperature beta; 0: all weights are 1.
        max_weight: upper bound before the division by the mean.
    """
    deviation = float(advantages.std())
    centered = advantages - advantages.mean()
    exponents = temperature * centered / deviation if deviation > _EQUAL else np.zeros(len(advantages))
    limit = np.log(max_weight)
    kept = np.minimum(exponents, limit)
    weights = np.exp(kept - kept.max())  # the largest is 1, so that not all round to 0
    return RowWeights(weights / weights.mean(), float((exponents > limit).mean()))

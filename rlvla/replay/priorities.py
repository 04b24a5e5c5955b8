"""Replay priorities: from TD errors, scores of a judge, or both.

`action_score` rates the action of a row, `progress` the completion of the task; both in 0..1, NaN until scored. A judge
is a VLM, a reward model, a reward machine or the environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlvla.options import Registry

Floats = NDArray[np.float64]
Priority = Callable[[ArrayLike, ArrayLike, ArrayLike], Floats]  # (action_score, progress, td_error), each [B] -> [B]

_ALMOST, _DONE = 0.1, 0.8  # progress of rows that almost succeeded
_BONUS = 0.3
_ACTION_WEIGHT, _PROGRESS_WEIGHT = 0.2, 0.8
_EPS = {"product": 1e-6, "additive": 1e-2}
_LARGEST_LOG = 600.0  # of a priority, and of the ratio of two: float64 holds them, their sums and their shares
_KINDS: Registry[Callable[..., Floats]] = Registry("replay priority")
register_priority = _KINDS.register
priority_names = _KINDS.names


@dataclass(frozen=True)
class PrioritySettings:
    """Settings of the built-in priorities.

    Attributes:
        alpha: exponent; 0 makes all rows equal.
        vlm_weight, td_weight: weights of the judge's score and of the TD error in `hybrid`.
        max_td_error: clip range of absolute TD errors.
        eps: keeps priorities above 0; by default 1e-6 for products, 1e-2 for sums.
        combine: "product" or "additive", see `hybrid_priority`.

    Raises:
        ValueError: a number is out of its range, `combine` is unknown, or the exponent is too large for float64.
    """

    alpha: float = 0.6
    vlm_weight: float = 0.5
    td_weight: float = 0.5
    max_td_error: float = 20.0
    eps: float | None = None
    combine: str = "additive"

    def __post_init__(self) -> None:
        for name in ("alpha", "vlm_weight", "td_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be a finite number, 0 or more")
        if self.vlm_weight == self.td_weight == 0:
            raise ValueError("vlm_weight and td_weight are both 0; one of them must be positive")
        if self.combine not in _EPS:
            raise ValueError(f"combine is {self.combine!r}; known: {', '.join(_EPS)}")
        for name, value in (("max_td_error", self.max_td_error), ("eps", self.floor)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a positive finite number")
        low, high = min(self.floor, self.eps or _EPS["product"]), 2.0 + self.max_td_error + self.floor  # 2: of a score
        exponent = self.alpha * max(1.0, self.vlm_weight + self.td_weight)
        if exponent * max(-math.log(low), math.log(high), math.log(high / low)) > _LARGEST_LOG:
            raise ValueError(
                f"alpha {self.alpha:g} is too large: powers of {low:.3g} and {high:.3g} are 0, infinite, or too far "
                "apart to be added; usual are 0 to 1"
            )

    @property
    def floor(self) -> float:
        """`eps`, or its default."""
        return _EPS[self.combine] if self.eps is None else self.eps


def make_priority(kind: str, settings: PrioritySettings | None = None) -> Priority:
    """The priority function of a registered kind (`priority_names`).

    Raises:
        ValueError: unknown kind.
    """
    return partial(_KINDS.get(kind), settings=settings or PrioritySettings())


def progress_factor(progress: ArrayLike) -> Floats:
    """Progress, raised by .3 where the task almost succeeded (.1 <= progress < .8)."""
    p = np.asarray(progress, dtype=np.float64)
    return np.where((p >= _ALMOST) & (p < _DONE), p + _BONUS, p)


def vlm_score(action_score: ArrayLike, progress: ArrayLike) -> Floats:
    """0.2 x action score + 0.8 x `progress_factor`; NaN where one of them is NaN.

    Raises:
        ValueError: a score or progress is negative or infinite.
    """
    score, done = (np.asarray(values, dtype=np.float64) for values in (action_score, progress))
    for name, values in (("action_score", score), ("progress", done)):
        wrong = values[(values < 0) | np.isinf(values)]
        if wrong.size:
            raise ValueError(f"{name} holds {wrong.flat[0]}; scores are 0 or more, and finite")
    return _ACTION_WEIGHT * score + _PROGRESS_WEIGHT * progress_factor(done)


def unscored(action_score: ArrayLike, progress: ArrayLike) -> NDArray[np.bool_]:
    """Mask of the rows without a score, whose priority falls back to the TD error."""
    return np.isnan(action_score) | np.isnan(progress)


@register_priority("uniform")
def uniform_priority(
    action_score: ArrayLike, progress: ArrayLike, td_error: ArrayLike, *, settings: PrioritySettings
) -> Floats:
    """1 for every row."""
    return np.ones(np.shape(td_error))


@register_priority("td")
def td_priority(
    action_score: ArrayLike, progress: ArrayLike, td_error: ArrayLike, *, settings: PrioritySettings
) -> Floats:
    """(|t| + eps)^alpha with the clipped TD error t (Schaul et al. 2016); eps is 1e-6 by default."""
    eps = _EPS["product"] if settings.eps is None else settings.eps
    td = np.abs(np.asarray(td_error, dtype=np.float64))
    return (np.minimum(td, settings.max_td_error) + eps) ** settings.alpha


@register_priority("vlm")
def vlm_priority(
    action_score: ArrayLike, progress: ArrayLike, td_error: ArrayLike, *, settings: PrioritySettings
) -> Floats:
    """(v + eps)^alpha with the score v = `vlm_score`: the additive hybrid without the TD error."""
    additive = replace(settings, vlm_weight=1.0, td_weight=0.0, combine="additive")
    return hybrid_priority(action_score, progress, td_error, settings=additive)


@register_priority("hybrid")
def hybrid_priority(
    action_score: ArrayLike, progress: ArrayLike, td_error: ArrayLike, *, settings: PrioritySettings
) -> Floats:
    """Priority from a judge's score v = `vlm_score` and a TD error t, clipped to +-max_td_error.

    product: (v + eps)^(alpha vlm_weight) (|t| + eps)^(alpha td_weight), with eps 1e-6 by default;
    additive: (vlm_weight v + td_weight |t| / max_td_error + eps)^alpha, with eps 1e-2.
    A row without a score (`unscored`) has the priority of its TD error alone, on the same scale: (|t| + eps)^alpha, or
    (|t| / max_td_error + eps)^alpha. It is NaN where a TD error is needed and is NaN.

    Raises:
        ValueError: as `vlm_score`.
    """
    alpha, floor, max_td_error = settings.alpha, settings.floor, settings.max_td_error
    vlm_weight, td_weight = settings.vlm_weight, settings.td_weight
    score = vlm_score(action_score, progress)
    td = np.minimum(np.abs(np.asarray(td_error, dtype=np.float64)), max_td_error)
    if settings.combine == "product":
        scored = (score + floor) ** (alpha * vlm_weight) * (td + floor) ** (alpha * td_weight)
        return np.where(np.isnan(score), (td + floor) ** alpha, scored)
    td_term = td_weight * td / max_td_error if td_weight else 0.0  # not NaN where the TD error does not count
    scored = (vlm_weight * score + td_term + floor) ** alpha
    return np.where(np.isnan(score), (td / max_td_error + floor) ** alpha, scored)

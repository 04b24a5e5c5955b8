"""Replay priorities: from TD errors, scores of a judge, or both.

`action_score` rates the action of a row, `progress` the completion of the task; both in 0..1, NaN until scored. A judge
is a VLM, a reward model, a reward machine or the environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlvla.options import Options, Registry, arg, keyword_arguments
from rlvla.utils.errors import Problem

Floats = NDArray[np.float64]
Priority = Callable[[ArrayLike, ArrayLike, ArrayLike], Floats]  # (action_score, progress, td_error), each [B] -> [B]

_ALMOST, _DONE = 0.1, 0.8  # progress of rows that almost succeeded
_BONUS = 0.3
_ACTION_WEIGHT, _PROGRESS_WEIGHT = 0.2, 0.8
_EPS = {"product": 1e-6, "additive": 1e-2}
_LARGEST_LOG = 600.0  # of a priority, and of the ratio of two: float64 holds them, their sums and their shares
REPLAY_PRIORITIES: Registry[Callable[..., Floats]] = Registry(
    "replay priority", flag="replay_priority", defaults={"reads_scores": True, "needs_scores": False}
)


def register_priority(
    name: str, *, options: type | None = None, reads_scores: bool = True, needs_scores: bool = False
) -> Callable[[Any], Any]:
    """Decorator that registers a function (action_score, progress, td_error) -> priorities, all [B].

    Args:
        name: for --replay_priority.
        options: frozen dataclass of `rlvla.options.arg` fields, which become flags; the function receives their values
            as keyword arguments.
        reads_scores: it reads `action_score` or `progress`.
        needs_scores: without a --replay_score_source it is refused.
    """
    return REPLAY_PRIORITIES.register(name, options=options, reads_scores=reads_scores, needs_scores=needs_scores)


@dataclass(frozen=True)
class TDOptions(Options):
    """Options of the built-in priorities with an exponent."""

    replay_alpha: float = arg(0.6, "exponent of the priorities; 0: all are equal", minimum=0, argument="alpha")
    replay_max_td_error: float = arg(20.0, "TD errors are clipped to this", above=0, argument="max_td_error")
    replay_eps: float | None = arg(
        None, "keeps priorities above 0 (default: 1e-6 for products, 1e-2 for sums)", above=0, argument="eps"
    )

    def problems(self) -> list[Problem]:
        """See `_exponent_problems`."""
        return _exponent_problems(self)


@dataclass(frozen=True)
class HybridOptions(TDOptions):
    """Options of `hybrid`."""

    replay_combine: str = arg("additive", "combination of score and TD error", choices=tuple(_EPS), argument="combine")
    replay_vlm_weight: float = arg(0.5, "weight of the judge's score", minimum=0, argument="vlm_weight")
    replay_td_weight: float = arg(0.5, "weight of the TD error", minimum=0, argument="td_weight")

    def problems(self) -> list[Problem]:
        """Two weights of 0, or an exponent too large for float64."""
        if self.replay_vlm_weight == self.replay_td_weight == 0:
            text = "--replay_vlm_weight and --replay_td_weight are both 0; one of them must be positive"
            return [Problem("replay_vlm_weight", "out_of_range", text)]
        return _exponent_problems(self, self.replay_vlm_weight + self.replay_td_weight, self.replay_combine)


def _exponent_problems(options: TDOptions, weights: float = 1.0, combine: str = "additive") -> list[Problem]:
    """An exponent too large for float64; `weights` is the sum of those of score and TD error."""
    alpha, floor = options.replay_alpha, options.replay_eps or _EPS[combine]
    low = options.replay_eps or _EPS["product"]
    high = 2.0 + options.replay_max_td_error + floor  # 2: of a score
    if alpha * max(1.0, weights) * max(-math.log(low), math.log(high), math.log(high / low)) <= _LARGEST_LOG:
        return []
    text = (
        f"--replay_alpha {alpha:g} is too large: powers of {low:.3g} and {high:.3g} are 0, infinite, or too far apart "
        "to be added; usual are 0 to 1"
    )
    return [Problem("replay_alpha", "out_of_range", text)]


def make_priority(kind: str, options: Any = None) -> Priority:
    """The priority function of a registered kind with these options of it; None: its defaults.

    Raises:
        ValueError: unknown kind.
    """
    function = REPLAY_PRIORITIES.get(kind)
    return partial(function, **keyword_arguments(options, REPLAY_PRIORITIES.parameters(kind)))


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


@register_priority("uniform", reads_scores=False)
def uniform_priority(action_score: ArrayLike, progress: ArrayLike, td_error: ArrayLike) -> Floats:
    """1 for every row."""
    return np.ones(np.shape(td_error))


@register_priority("td", options=TDOptions, reads_scores=False)
def td_priority(
    action_score: ArrayLike,
    progress: ArrayLike,
    td_error: ArrayLike,
    *,
    alpha: float = 0.6,
    max_td_error: float = 20.0,
    eps: float | None = None,
) -> Floats:
    """(|t| + eps)^alpha with the clipped TD error t (Schaul et al. 2016); eps is 1e-6 by default."""
    td = np.abs(np.asarray(td_error, dtype=np.float64))
    return (np.minimum(td, max_td_error) + (_EPS["product"] if eps is None else eps)) ** alpha


@register_priority("vlm", options=TDOptions, needs_scores=True)
def vlm_priority(
    action_score: ArrayLike,
    progress: ArrayLike,
    td_error: ArrayLike,
    *,
    alpha: float = 0.6,
    max_td_error: float = 20.0,
    eps: float | None = None,
) -> Floats:
    """(v + eps)^alpha with the score v = `vlm_score`: the additive hybrid without the TD error."""
    settings: dict[str, Any] = {"alpha": alpha, "max_td_error": max_td_error, "eps": eps}
    return hybrid_priority(action_score, progress, td_error, vlm_weight=1.0, td_weight=0.0, **settings)


@register_priority("hybrid", options=HybridOptions, needs_scores=True)
def hybrid_priority(
    action_score: ArrayLike,
    progress: ArrayLike,
    td_error: ArrayLike,
    *,
    alpha: float = 0.6,
    vlm_weight: float = 0.5,
    td_weight: float = 0.5,
    max_td_error: float = 20.0,
    eps: float | None = None,
    combine: str = "additive",
) -> Floats:
    """Priority from a judge's score v = `vlm_score` and a TD error t, clipped to +-max_td_error.

    product: (v + eps)^(alpha vlm_weight) (|t| + eps)^(alpha td_weight), with eps 1e-6 by default;
    additive: (vlm_weight v + td_weight |t| / max_td_error + eps)^alpha, with eps 1e-2.
    A row without a score (`unscored`) has the priority of its TD error alone, on the same scale: (|t| + eps)^alpha, or
    (|t| / max_td_error + eps)^alpha. It is NaN where a TD error is needed and is NaN.

    Raises:
        ValueError: as `vlm_score`.
    """
    floor = _EPS[combine] if eps is None else eps
    score = vlm_score(action_score, progress)
    td = np.minimum(np.abs(np.asarray(td_error, dtype=np.float64)), max_td_error)
    if combine == "product":
        scored = (score + floor) ** (alpha * vlm_weight) * (td + floor) ** (alpha * td_weight)
        return np.where(np.isnan(score), (td + floor) ** alpha, scored)
    td_term = td_weight * td / max_td_error if td_weight else 0.0  # not NaN where the TD error does not count
    scored = (vlm_weight * score + td_term + floor) ** alpha
    return np.where(np.isnan(score), (td / max_td_error + floor) ** alpha, scored)

"""Curricula over tasks: sampling probabilities from success rates.

A curriculum is a function from `TaskSuccess` to a weight per task; `task_shares` turns weights into probabilities.
Its options are keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvla.options import Registry, keyword_arguments

# The slow mean of success looks back over this many horizons.
SLOW = 4.0


@dataclass
class TaskSuccess:
    """Exponential means of the success of each of T tasks.

    Attributes:
        recent: [T], over about `horizon` episodes; 0 before the first.
        earlier: [T], over `SLOW` times as many.
        episodes: [T], number of episodes.
        horizon: episodes after which an outcome counts 1/e.
    """

    recent: np.ndarray
    earlier: np.ndarray
    episodes: np.ndarray
    horizon: float

    @classmethod
    def unknown(cls, tasks: int, horizon: float) -> TaskSuccess:
        """Before the first episode."""
        return cls(np.zeros(tasks), np.zeros(tasks), np.zeros(tasks, dtype=np.int64), horizon)

    def observe(self, task: int, outcomes: Sequence[bool]) -> None:
        """Add episodes of a task, all played with the same policy, so that their order does not matter."""
        count, mean = len(outcomes), float(np.mean(outcomes))
        for means, horizon in ((self.recent, self.horizon), (self.earlier, SLOW * self.horizon)):
            kept = np.exp(-count / horizon) if self.episodes[task] else 0.0
            means[task] = mean + kept * (means[task] - mean)
        self.episodes[task] += count


Curriculum = Callable[..., np.ndarray]
TASK_SAMPLINGS: Registry[Curriculum] = Registry("task sampling", flag="task_sampling")


def register_task_sampling(name: str, *, options: type | None = None) -> Callable[[Curriculum], Curriculum]:
    """Decorator that registers a curriculum: a function from `TaskSuccess` to weights [T], not negative.

    Args:
        name: for --task_sampling.
        options: frozen dataclass of `rlvla.options.arg` fields, which become flags; the function receives their values
            as keyword arguments.
    """
    return TASK_SAMPLINGS.register(name, options=options)


@register_task_sampling("uniform")
def uniform(success: TaskSuccess) -> np.ndarray:
    """1 for every task; runs have no curriculum then, but visit every initial state equally often."""
    return np.ones(len(success.recent))


@register_task_sampling("inverse_success")
def inverse_success(success: TaskSuccess) -> np.ndarray:
    """Failure rate; 1 for a task without episodes."""
    return 1.0 - success.recent


@register_task_sampling("learning_progress")
def learning_progress(success: TaskSuccess) -> np.ndarray:
    """Absolute learning progress (Portelas et al. 2019): |recent - earlier|."""
    return np.abs(success.recent - success.earlier)


def task_shares(name: str, success: TaskSuccess, factors: np.ndarray, floor: float, options: Any = None) -> np.ndarray:
    """Probabilities [T] of the tasks.

    Args:
        name: name of a curriculum.
        success: statistics of the tasks; a task without episodes weighs at least as much as any other.
        factors: [T], multiply the probabilities; not negative and not all 0.
        floor: share of the draws that is uniform over the tasks, above 0.
        options: options of the curriculum; None: its defaults.

    Raises:
        ValueError: unknown name, or a curriculum that raises (the cause of the error), or whose weights are negative,
            not finite or of another number.
    """
    curriculum = TASK_SAMPLINGS.get(name)
    arguments = keyword_arguments(options, TASK_SAMPLINGS.parameters(name))
    try:
        weights = np.array(curriculum(success, **arguments), dtype=np.float64)
    except Exception as error:  # from a user's curriculum
        raise ValueError(f"task sampling {name!r} failed") from error
    if weights.shape != success.recent.shape or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"task sampling {name!r} must return {len(success.recent)} finite weights, not {weights}")
    played = success.episodes > 0
    weights[~played] = np.maximum(weights[~played], weights[played].max(initial=0.0))
    total, even = weights.sum(), 1.0 / len(weights)
    shares = factors * ((1.0 - floor) * (weights / total if total else even) + floor * even)
    return shares / shares.sum()

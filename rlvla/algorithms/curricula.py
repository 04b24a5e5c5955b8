"""Curricula over tasks: which are to be played more often, by how often each has succeeded.

A curriculum is a function from `TaskSuccess` to a weight per task; `task_shares` turns weights into probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlvla.options import Registry

# The slow mean of success looks back over this many horizons.
SLOW = 4.0


@dataclass
class TaskSuccess:
    """Exponential means of the success of each of T tasks.

    Attributes:
        recent: [T], over about `horizon` episodes; 0 before the first.
        earlier: [T], over `SLOW` times as many.
        episodes: [T], how many were played.
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
        """Count some episodes of a task, all of which were played with the same policy: their order does not matter."""
        count, mean = len(outcomes), float(np.mean(outcomes))
        for means, horizon in ((self.recent, self.horizon), (self.earlier, SLOW * self.horizon)):
            kept = np.exp(-count / horizon) if self.episodes[task] else 0.0
            means[task] = mean + kept * (means[task] - mean)
        self.episodes[task] += count


Curriculum = Callable[[TaskSuccess], np.ndarray]
_CURRICULA: Registry[Curriculum] = Registry("task sampling")


def register_task_sampling(name: str) -> Callable[[Curriculum], Curriculum]:
    """Decorator that registers a curriculum: a function from `TaskSuccess` to weights [T], not negative."""
    return _CURRICULA.register(name)


def list_task_samplings() -> list[str]:
    """The names of `--task_sampling`: "uniform" first, which is no curriculum."""
    return ["uniform", *_CURRICULA.names()]


@register_task_sampling("inverse_success")
def inverse_success(success: TaskSuccess) -> np.ndarray:
    """The share of failures; 1 for a task that was never played."""
    return 1.0 - success.recent


@register_task_sampling("learning_progress")
def learning_progress(success: TaskSuccess) -> np.ndarray:
    """How far success has moved, up or down (Portelas et al. 2019): |recent - earlier|."""
    return np.abs(success.recent - success.earlier)


def task_shares(name: str, success: TaskSuccess, factors: np.ndarray, floor: float) -> np.ndarray:
    """Probabilities [T] of the tasks.

    Args:
        name: of a curriculum.
        success: of the tasks; one that was never played weighs at least as much as the heaviest other.
        factors: [T], by which the probabilities are multiplied; not negative and not all 0.
        floor: share of the draws that goes to all tasks alike, whatever the curriculum says, above 0.

    Raises:
        ValueError: unknown name, or a curriculum that raises (the cause of the error), or whose weights are negative,
            not finite or of another number.
    """
    curriculum = _CURRICULA.get(name)
    try:
        weights = np.array(curriculum(success), dtype=np.float64)
    except Exception as error:  # of the user's own
        raise ValueError(f"task sampling {name!r} failed") from error
    if weights.shape != success.recent.shape or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"task sampling {name!r} must return {len(success.recent)} finite weights, not {weights}")
    played = success.episodes > 0
    weights[~played] = np.maximum(weights[~played], weights[played].max(initial=0.0))
    total, even = weights.sum(), 1.0 / len(weights)
    shares = factors * ((1.0 - floor) * (weights / total if total else even) + floor * even)
    return shares / shares.sum()

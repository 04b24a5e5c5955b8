"""Scores finished episodes in batches on background threads during the rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlvla.options import arg
from rlvla.utils.terminal import printable

if TYPE_CHECKING:
    from rlvla.experience import Sample

_LARGEST = float(np.finfo(np.float32).max)
_NO_REWARD = np.full(0, np.nan)
_LONGEST_NAME = 64
_MOST_NAMES = 100
_COUNTERS = frozenset({"requests", "failures", "retries", "timeouts", "seconds"})  # names of a source's own metrics


@dataclass(frozen=True)
class NamedNumbers:
    """A reward with further numbers of the episode, which are logged and dumped but not trained on.

    Attributes:
        reward: the reward of the episode, or one per executed step.
        numbers: name -> number.
        scores: as `EpisodeReward.scores`.
    """

    reward: float | np.ndarray
    numbers: dict[str, float]
    scores: tuple[tuple[int, float, float], ...] = ()


SampleReward = float | np.ndarray | NamedNumbers


@dataclass(frozen=True)
class BatchOptions:
    """Batching of episodes for judges in the background."""

    reward_fn_batch_size: int = arg(8, "reward_fn, remote: episodes per call", minimum=1)
    reward_fn_workers: int = arg(4, "reward_fn, remote: concurrent calls, during the rollout", minimum=1, maximum=1024)


class BackgroundJudge:
    """A `SampleSource` around a function that may be slow.

    Args:
        judge: maps a list of samples to their rewards.
        batch_size: samples per call.
        workers: number of concurrent calls.
    """

    def __init__(self, judge: Callable[[list[Sample]], list[SampleReward]], batch_size: int, workers: int):
        self._judge, self._batch_size = judge, batch_size
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._waiting: list[Sample] = []
        self._running: list[Future[list[SampleReward]]] = []

    def submit(self, sample: Sample) -> None:
        """Queue an episode; a full batch is started at once."""
        self._waiting.append(sample)
        if len(self._waiting) >= self._batch_size:
            self._flush()

    def collect(self) -> list[SampleReward]:
        """Wait for all rewards since the last call, in order; exceptions of the function propagate."""
        self._flush()
        running, self._running = self._running, []
        return [reward for future in running for reward in future.result()]

    def close(self) -> None:
        """Shut down the threads; calls that have not started are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _flush(self) -> None:
        if self._waiting:
            self._running.append(self._threads.submit(self._judge, self._waiting))
            self._waiting = []


def steps_checked(rewards: object, samples: list[Sample], who: str, names: set[str]) -> list[SampleReward]:
    """Validate rewards and convert them to floats, arrays, and `NamedNumbers` for entries (reward, {name: number}).

    Args:
        rewards: the rewards as a user's function or server returned them.
        samples: the episodes.
        who: its name, for messages.
        names: names of numbers so far; the names in a valid answer are added.

    Raises:
        ValueError: not one entry per sample, an entry that is neither a number nor one number per executed step, or not
            finite in float32; names that are not short texts, that are reserved, or too many; numbers that are not
            finite.
    """
    listed = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    if not isinstance(listed, (list, tuple)) or len(listed) != len(samples):
        count = len(listed) if isinstance(listed, (list, tuple)) else type(rewards).__name__
        raise ValueError(f"{who} must give a list with one entry for each of the {len(samples)} episodes, not {count}")
    checked: list[SampleReward] = []
    for entry, sample in zip(listed, samples):
        numbers = None
        if isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], Mapping):
            entry, numbers = entry[0], _numbers_checked(entry[1], who)
        try:
            value = np.asarray(entry)
            value = value.astype(np.float64) if value.dtype.kind in "biufO" else _NO_REWARD
        except (TypeError, ValueError, OverflowError):
            value = _NO_REWARD
        if value.shape not in ((), (sample.finish_step,)) or not (np.abs(value) <= _LARGEST).all():
            raise ValueError(
                f"{who} gave {printable(str(entry), 80)} for an episode of {sample.finish_step} steps; it must be one "
                "finite number, or one for each step"
            )
        reward = float(value) if value.ndim == 0 else value
        checked.append(reward if numbers is None else NamedNumbers(reward, numbers))
    all_names = names.union(*(entry.numbers for entry in checked if isinstance(entry, NamedNumbers)))
    if len(all_names) > _MOST_NAMES:
        raise ValueError(
            f"{who} gave named numbers with {len(all_names)} different names, "
            f"{printable(', '.join(sorted(all_names)), 80)}; "
            f"each becomes a metric, at most {_MOST_NAMES}: give the same names for every episode"
        )
    names |= all_names
    return checked


def _numbers_checked(numbers: Mapping[object, object], who: str) -> dict[str, float]:
    """Names and numbers as str and float; ValueError if they are invalid."""
    checked = {}
    for name, number in numbers.items():
        try:
            value = float(number)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError, RuntimeError):
            value = np.nan
        usable = isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.replace("_", "a").isalnum()
        if not usable or not np.isfinite(value) or isinstance(number, str):
            raise ValueError(
                f"{who} gave the named number {str(name)[:80]!r}: {str(number)[:80]}; a name is made of letters, "
                f"digits and _ (at most {_LONGEST_NAME}), and the number is finite"
            )
        if name in _COUNTERS:
            raise ValueError(f"{who} gave the named number '{name}', which is reserved for a count of rlvla; rename it")
        checked[str(name)] = value
    return checked

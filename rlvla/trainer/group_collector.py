"""Which groups an iteration trains on: dynamic sampling with filters, and surplus groups carried on.

Without filters an iteration plays its groups once. With filters it plays further rounds until every rank has kept as
many groups as it trains on, or the rounds are used up (dynamic sampling, DAPO: Yu et al. 2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from rlvla.algorithms.filtering import filter_groups, groups_to_sample
from rlvla.experience import Sample
from rlvla.rollout import EpisodeRequest
from rlvla.trainer.config import BatchConfig, FilterConfig
from rlvla.trainer.task_sampler import TaskSampler
from rlvla.utils.strategy import DeepspeedStrategy

Play = Callable[[list[EpisodeRequest]], list[Sample]]
T = TypeVar("T")
REASONS = ("accuracy_low", "accuracy_high", "zero_variance", "truncated", "stale", "incomplete")


@dataclass
class Group:
    """Episodes of one uid.

    Attributes:
        born: iteration in which they were played.
        samples: the episodes.
    """

    born: int
    samples: list[Sample]


@dataclass
class Collected:
    """What an iteration has to train on, on this rank.

    Attributes:
        samples: the episodes to train on; at least one, or none on every rank if fewer groups than ranks were kept.
        played: all episodes played for it.
        counts: kept_groups, carried_groups, dropped_<reason> of this rank, and rounds, which are equal on all.
        groups: groups to train on, over all ranks.
    """

    samples: list[Sample]
    played: list[Sample]
    counts: dict[str, float]
    groups: int


@dataclass
class _Round:
    """The bookkeeping of one iteration."""

    kept: list[Group]
    played: list[Sample] = field(default_factory=list)
    dropped: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REASONS, 0.0))
    rounds: int = 0


def some_for_everyone(samples: Sequence[Sample], strategy: DeepspeedStrategy) -> tuple[list[Sample], int]:
    """The samples of this rank, and the number of groups of all; where a rank has none, all groups are dealt out anew.

    Ranks train together: one without samples would leave the others waiting. If there are fewer groups than ranks,
    there are no samples on any rank, and 0 groups.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.uid, []).append(sample)
    fewest = -strategy.all_reduce({"n": -float(len(groups))}, "max")["n"]
    if fewest:
        return list(samples), int(strategy.all_reduce({"n": float(len(groups))}, "sum")["n"])
    own, total = _dealt_out(list(groups.values()), strategy)
    return [sample for group in own for sample in group], total


def _dealt_out(items: Sequence[T], strategy: DeepspeedStrategy) -> tuple[list[T], int]:
    """This rank's part of what all ranks pass, and the number of all; nothing and 0 if there is not one for each."""
    everywhere = [item for part in strategy.gather_objects(items) for item in part]
    if len(everywhere) < strategy.world_size:
        return [], 0
    return everywhere[strategy.rank :: strategy.world_size], len(everywhere)


class GroupCollector:
    """Plays and filters groups.

    Args:
        sampler: what to play.
        strategy: ranks play equally many groups in each round.
        batch: groups per iteration.
        filters: what is kept.
    """

    def __init__(self, sampler: TaskSampler, strategy: DeepspeedStrategy, batch: BatchConfig, filters: FilterConfig):
        self._sampler, self._strategy, self._batch, self._filters = sampler, strategy, batch, filters
        self._quota = batch.rollout_batch_size // strategy.world_size
        self._position = 0  # groups drawn so far, over all ranks
        self._carried: list[Group] = []

    def collect(self, iteration: int, play: Play) -> Collected:
        """The groups of an iteration, counted from 0. `play` is called equally often on every rank."""
        if not self._filters.active:
            first = self._strategy.rank * self._quota
            groups = range(first, first + self._quota)
            played = play(self._sampler.draw(iteration, groups, self._batch.rollout_batch_size))
            samples, incomplete = self._comparable(played)
            kept = float(len({sample.uid for sample in samples}))
            counts = {"kept_groups": kept, "dropped_incomplete": incomplete, "rounds": 1.0}
            samples, total = some_for_everyone(samples, self._strategy)
            return Collected(samples, played, counts, total)
        work = _Round([])
        for group in self._carried:
            self._keep_if_fresh(group, iteration, work)
        missing = self._missing(work)
        while missing and work.rounds < self._filters.max_rollout_rounds:
            count = groups_to_sample(missing, self._filters.oversample_factor)
            start = self._position + self._strategy.rank * count
            self._position += count * self._strategy.world_size
            self._sift(play(self._sampler.at(range(start, start + count))), iteration, work)
            work.rounds += 1
            missing = self._missing(work)
        return self._finish(iteration, work, complete=not missing)

    def _missing(self, work: _Round) -> int:
        """The most groups any rank still needs."""
        return int(self._strategy.all_reduce({"n": max(0, self._quota - len(work.kept))}, "max")["n"])

    def _keep_if_fresh(self, group: Group, iteration: int, work: _Round) -> None:
        if iteration - group.born <= self._filters.max_group_staleness:
            work.kept.append(group)
        else:
            work.dropped["stale"] += 1

    def _comparable(self, samples: Sequence[Sample]) -> tuple[list[Sample], float]:
        """Without groups of which failing environments have left a single episode; and their number."""
        members = Counter(sample.uid for sample in samples)
        alone = {uid for uid, count in members.items() if count == 1 < self._batch.n_samples_per_prompt}
        return [sample for sample in samples if sample.uid not in alone], float(len(alone))

    def _sift(self, samples: Sequence[Sample], iteration: int, work: _Round) -> None:
        filters = self._filters
        work.played += samples
        samples, incomplete = self._comparable(samples)
        work.dropped["incomplete"] += incomplete
        if not samples:
            return
        uids = [sample.uid for sample in samples]
        result = filter_groups(
            uids,
            success=torch.tensor([sample.success_at_end for sample in samples]),
            accuracy_bounds=(
                (filters.accuracy_lower_bound, filters.accuracy_upper_bound) if filters.filter_accuracy else None
            ),
            scores=torch.tensor([sample.score for sample in samples]) if filters.filter_zero_variance else None,
            truncated=torch.tensor([sample.truncated for sample in samples]) if filters.filter_truncated else None,
        )
        for reason, count in result.dropped.items():
            work.dropped[reason] += count
        kept = [sample for sample, keep in zip(samples, result.keep.tolist()) if keep]
        for uid in dict.fromkeys(sample.uid for sample in kept):
            work.kept.append(Group(iteration, [sample for sample in kept if sample.uid == uid]))

    def _finish(self, iteration: int, work: _Round, *, complete: bool) -> Collected:
        """The first `quota` groups are trained on; the rest goes on to the next iteration while it is fresh enough."""
        surplus = _Round([])
        for group in work.kept[self._quota :]:
            self._keep_if_fresh(group, iteration + 1, surplus)
        self._carried = surplus.kept
        work.dropped["stale"] += surplus.dropped["stale"]
        chosen = work.kept[: self._quota]
        total = self._batch.rollout_batch_size
        if not complete:  # some rank lacks groups: all are shared out anew
            chosen, total = _dealt_out(chosen, self._strategy)
        counts = {"kept_groups": float(len(chosen)), "carried_groups": float(len(self._carried))}
        counts |= {f"dropped_{reason}": number for reason, number in work.dropped.items()}
        counts["rounds"] = float(work.rounds)
        samples = [sample for group in chosen for sample in group.samples]
        return Collected(samples, work.played, counts, total)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank must hold to go on with the same groups."""
        carried = [{"born": group.born, "samples": group.samples} for group in self._carried]
        return {"position": self._position, "carried": carried}

    def share_out(self, states: Sequence[dict[str, Any]]) -> int:
        """Continue from the `state_dict`s of another number of ranks: waiting groups are dealt out anew.

        Returns:
            How many groups wait, over all ranks.
        """
        carried = [entry for state in states for entry in state["carried"]]
        own = carried[self._strategy.rank :: self._strategy.world_size]
        self.load_state_dict({"position": states[0]["position"], "carried": own})
        return len(carried)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._position = int(state["position"])
        self._carried = [Group(entry["born"], list(entry["samples"])) for entry in state["carried"]]

"""Collecting the groups of an iteration: dynamic sampling with filters, and surplus groups carried over.

Without filters an iteration plays its groups once. With filters it plays further rounds until each rank has kept enough
groups, or until the maximum number of rounds is reached (dynamic sampling, DAPO: Yu et al. 2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from rlvla.algorithms.filtering import filter_groups, groups_to_sample
from rlvla.experience import Prepare, Sample
from rlvla.rollout import EpisodeRequest
from rlvla.rollout.task_sampler import Sampler
from rlvla.trainer.algorithm_config import FilterConfig
from rlvla.trainer.config import BatchConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import TrainingHalted

T = TypeVar("T")
REASONS = (
    "accuracy_low",
    "accuracy_high",
    "metric_missing",
    "metric_low",
    "metric_high",
    "zero_variance",
    "truncated",
    "stale",
    "incomplete",
)


# Numbers of an episode by which groups can be filtered, besides its rewards.
EPISODE_METRICS: dict[str, Callable[[Sample], float]] = {
    "score": lambda sample: sample.score,
    "success_once": lambda sample: float(sample.success_once),
    "success_at_end": lambda sample: float(sample.success_at_end),
    "episode_length": lambda sample: float(sample.finish_step),
    "regressions": lambda sample: float(sample.regressions),
}


def episode_metric(sample: Sample, name: str) -> float | None:
    """A number of an episode: one of `EPISODE_METRICS`, the reward of a source, or a number that a source reported.

    None if the episode has no such number: a reward function may report a number of some episodes only.
    """
    if name in EPISODE_METRICS:
        return EPISODE_METRICS[name](sample)
    if name in sample.reward_components:
        return float(sample.reward_components[name].sum())
    if name in sample.reward_info:
        return float(sample.reward_info[name])
    return None


class UnknownMetricError(TrainingHalted):
    """No episode of any rank has had the number by which groups are filtered."""


@dataclass
class Group:
    """Episodes with the same uid.

    Attributes:
        created_iteration: iteration in which they were played.
        samples: the episodes.
    """

    created_iteration: int
    samples: list[Sample]


@dataclass
class Collected:
    """The episodes that an iteration trains on, on this rank.

    Attributes:
        samples: the episodes to train on; at least one, or none on any rank if fewer groups than ranks were kept.
        played: all episodes played in the iteration.
        counts: kept_groups, carried_groups and dropped_<reason> of this rank; rounds, which are equal on all ranks.
        groups: number of groups to train on, over all ranks.
    """

    samples: list[Sample]
    played: list[Sample]
    counts: dict[str, float]
    groups: int


@dataclass
class _Round:
    """State of an iteration in progress."""

    iteration: int
    missing: int = 0
    kept: list[Group] = field(default_factory=list)
    played: list[Sample] = field(default_factory=list)
    dropped: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REASONS, 0.0))
    rounds: int = 0


@dataclass(frozen=True)
class _State:
    """State before an iteration, restored if it is abandoned."""

    position: int
    carried: list[Group]
    ahead: dict[int, list[EpisodeRequest]]


def reshard_if_any_empty(samples: Sequence[Sample], strategy: DeepspeedStrategy) -> tuple[list[Sample], int]:
    """The samples of this rank and the total number of groups; all groups are re-sharded if any rank has none.

    A rank without samples would leave the others waiting in collective operations. With fewer groups than ranks, no
    rank gets any samples, and the number of groups is 0.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.uid, []).append(sample)
    fewest = -strategy.all_reduce({"n": -float(len(groups))}, "max")["n"]
    if fewest:
        return list(samples), int(strategy.all_reduce({"n": float(len(groups))}, "sum")["n"])
    shard, total = _reshard(list(groups.values()), strategy)
    return [sample for group in shard for sample in group], total


def _reshard(items: Sequence[T], strategy: DeepspeedStrategy) -> tuple[list[T], int]:
    """This rank's shard of the items of all ranks and their total number; ([], 0) with fewer items than ranks."""
    everywhere = [item for part in strategy.gather_objects(items) for item in part]
    if len(everywhere) < strategy.world_size:
        return [], 0
    return everywhere[strategy.rank :: strategy.world_size], len(everywhere)


class GroupCollector:
    """Plans the groups of an iteration and filters them.

    Args:
        sampler: draws the tasks and initial states to play.
        strategy: used to play the same number of groups on each rank in a round.
        batch: number of groups per iteration and of episodes per group.
        filters: which groups are kept.
    """

    def __init__(self, sampler: Sampler, strategy: DeepspeedStrategy, batch: BatchConfig, filters: FilterConfig):
        self._sampler, self._strategy, self._batch, self._filters = sampler, strategy, batch, filters
        self._quota = batch.rollout_batch_size // strategy.world_size
        self._position = 0  # groups drawn so far, over all ranks
        self._carried: list[Group] = []
        self._has_seen_metric = filters.filter_metric is None  # on any rank
        self._round: _Round | None = None
        self._ahead: dict[int, list[EpisodeRequest]] = {}  # iteration -> its first round, planned before it begins
        self._before: _State | None = None

    def plan(self, iteration: int) -> list[EpisodeRequest] | None:
        """The next round of episodes of an iteration (counted from 0), or None on all ranks once there are enough.

        Raises:
            UnknownMetricError: on all ranks, if no episode has had the number of `filter_metric` after the last round.
        """
        if self._round is None:
            self._begin(iteration)
        work = self._round
        assert work is not None
        if not work.rounds and iteration in self._ahead:
            work.rounds = 1
            return self._ahead.pop(iteration)
        if not self._filters.active:
            if work.rounds:
                return None
            work.rounds = 1
            return self._all_groups(iteration)
        work.missing = self._most_of_ranks(self._quota - len(work.kept))  # on any rank
        if not work.missing:
            self._has_seen_metric = True
            return None
        if work.rounds >= self._filters.max_rollout_rounds:
            self._check_metric(work)
            return None
        work.rounds += 1
        return self._next_groups(work.missing)

    def plan_ahead(self, iteration: int) -> list[EpisodeRequest]:
        """The first round of a later iteration, which `plan` returns when that begins.

        Empty if the groups carried over, which are counted unless other rounds are planned before it, will do.
        """
        if iteration in self._ahead:
            return self._ahead[iteration]
        if not self._filters.active:
            planned = self._all_groups(iteration)
        else:
            waiting = 0 if self._ahead else sum(self._is_fresh(group, iteration) for group in self._carried)
            missing = self._most_of_ranks(self._quota - waiting)
            planned = self._next_groups(missing) if missing else []
        if planned:
            self._ahead = self._ahead | {iteration: planned}
        return planned

    def _all_groups(self, iteration: int) -> list[EpisodeRequest]:
        """The groups of this rank in an iteration without filters."""
        first = iteration * self._batch.rollout_batch_size + self._strategy.rank * self._quota
        return self._sampler.at(range(first, first + self._quota))

    def _next_groups(self, missing: int) -> list[EpisodeRequest]:
        """Further groups, enough that so many may pass the filters on each rank."""
        count = groups_to_sample(missing, self._filters.oversample_factor)
        start = self._position + self._strategy.rank * count
        self._position += count * self._strategy.world_size
        return self._sampler.at(range(start, start + count))

    def ingest(self, samples: Sequence[Sample]) -> None:
        """Receive the episodes of the round."""
        work = self._round
        assert work is not None
        if self._filters.active:
            self._filter(samples, work.iteration, work)
        else:
            work.played += samples

    def collected(self) -> Collected:
        """The groups of the finished iteration; called once `plan` has returned None."""
        work, self._round = self._round, None
        assert work is not None
        if self._filters.active:
            return self._finish(work.iteration, work, complete=not work.missing)
        samples, incomplete = self._comparable(work.played)
        kept = float(len({sample.uid for sample in samples}))
        counts = {"kept_groups": kept, "dropped_incomplete": incomplete, "rounds": 1.0}
        samples, total = reshard_if_any_empty(samples, self._strategy)
        return Collected(samples, work.played, counts, total)

    def commit(self) -> None:
        """Confirm the iteration: it can no longer be abandoned."""
        self._before = None

    def abandon(self) -> None:
        """Discard the iteration in progress, unless it was committed; groups carried over into it are kept."""
        if self._before is not None:
            state = self._before
            self._position, self._carried, self._ahead = state.position, state.carried, state.ahead
        self._round = self._before = None

    def _begin(self, iteration: int) -> None:
        self._before = _State(self._position, self._carried, dict(self._ahead))
        self._round = _Round(iteration)
        self._keep_fresh(self._carried, iteration, self._round)

    def _most_of_ranks(self, number: int) -> int:
        return int(self._strategy.all_reduce({"n": max(0, number)}, "max")["n"])

    def _check_metric(self, work: _Round) -> None:
        """End the run on all ranks if episodes have been played and none has had the number to filter by."""
        name = self._filters.filter_metric
        if self._has_seen_metric or name is None:
            return
        reported = bool(work.kept) or any(episode_metric(sample, name) is not None for sample in work.played)
        reduced = self._strategy.all_reduce({"seen": float(reported), "played": float(len(work.played))}, "max")
        self._has_seen_metric = bool(reduced["seen"])
        if reduced["seen"] or not reduced["played"]:
            return
        self.abandon()
        sources = [key for sample in work.played for key in [*sample.reward_components, *sample.reward_info]]
        available = ", ".join(dict.fromkeys([*EPISODE_METRICS, *sources]))
        raise UnknownMetricError(f"--filter_metric {name}: no episode has such a number; they have {available}")

    def _keep_fresh(self, groups: Sequence[Group], iteration: int, work: _Round) -> None:
        """Add the groups that are fresh enough for an iteration to those kept; count the others."""
        fresh = [group for group in groups if self._is_fresh(group, iteration)]
        work.kept += fresh
        work.dropped["stale"] += len(groups) - len(fresh)

    def _is_fresh(self, group: Group, iteration: int) -> bool:
        return iteration - group.created_iteration <= self._filters.max_group_staleness

    def _comparable(self, samples: Sequence[Sample]) -> tuple[list[Sample], float]:
        """The samples without groups reduced to a single episode by failing environments; and their number."""
        members = Counter(sample.uid for sample in samples)
        alone = {uid for uid, count in members.items() if count == 1 < self._batch.n_samples_per_prompt}
        return [sample for sample in samples if sample.uid not in alone], float(len(alone))

    def _filter(self, samples: Sequence[Sample], iteration: int, work: _Round) -> None:
        filters = self._filters
        work.played += samples
        samples, incomplete = self._comparable(samples)
        work.dropped["incomplete"] += incomplete
        metric = filters.filter_metric
        numbers = {id(sample): episode_metric(sample, metric) if metric else 0.0 for sample in samples}
        lacking = {sample.uid for sample in samples if numbers[id(sample)] is None}
        work.dropped["metric_missing"] += len(lacking)
        samples = [sample for sample in samples if sample.uid not in lacking]
        if not samples:
            return
        uids = [sample.uid for sample in samples]
        result = filter_groups(
            uids,
            success=torch.tensor([sample.success_at_end for sample in samples]),
            accuracy_bounds=(
                (filters.accuracy_lower_bound, filters.accuracy_upper_bound) if filters.filter_accuracy else None
            ),
            metric=torch.tensor([numbers[id(sample)] for sample in samples]) if metric else None,
            metric_bounds=(filters.filter_metric_range[0], filters.filter_metric_range[1]) if metric else None,
            scores=torch.tensor([sample.score for sample in samples]) if filters.filter_zero_variance else None,
            truncated=torch.tensor([sample.truncated for sample in samples]) if filters.filter_truncated else None,
        )
        for reason, count in result.dropped.items():
            work.dropped[reason] += count
        kept = [sample for sample, keep in zip(samples, result.keep.tolist()) if keep]
        for uid in dict.fromkeys(sample.uid for sample in kept):
            work.kept.append(Group(iteration, [sample for sample in kept if sample.uid == uid]))

    def _finish(self, iteration: int, work: _Round, *, complete: bool) -> Collected:
        """Train on the first `quota` groups; the others are carried over unless they become stale."""
        kept, total = work.kept, self._batch.rollout_batch_size
        if not complete:  # some rank has too few groups
            kept, everywhere = _reshard(kept, self._strategy)
            total = min(total, everywhere)
        chosen, surplus = kept[: self._quota], _Round(iteration)
        self._keep_fresh(kept[self._quota :], iteration + 1, surplus)
        self._carried = surplus.kept
        work.dropped["stale"] += surplus.dropped["stale"]
        counts = {"kept_groups": float(len(chosen)), "carried_groups": float(len(self._carried))}
        counts |= {f"dropped_{reason}": number for reason, number in work.dropped.items()}
        counts["rounds"] = float(work.rounds)
        samples = [sample for group in chosen for sample in group.samples]
        return Collected(samples, work.played, counts, total)

    def state_dict(self) -> dict[str, Any]:
        """State of this rank for a checkpoint: position of the sampler, groups carried over, rounds planned ahead."""
        # The key "born" is part of the checkpoint format.
        carried = [{"born": group.created_iteration, "samples": group.samples} for group in self._carried]
        ahead = {iteration: [asdict(r) for r in requests] for iteration, requests in self._ahead.items()}
        state = {"position": self._position, "carried": carried, "metric_seen": self._has_seen_metric}
        return state | ({"ahead": ahead} if ahead else {})

    def reshard_state(self, states: Sequence[dict[str, Any]], prepare: Prepare | None = None) -> int:
        """Restore the `state_dict`s of a different number of ranks, re-sharding the groups carried over.

        Returns:
            Number of groups carried over, over all ranks.
        """
        mine = slice(self._strategy.rank, None, self._strategy.world_size)
        carried = [entry for state in states for entry in state["carried"]]
        ahead = {}
        for iteration in states[0].get("ahead", {}):
            requests = [request for state in states for request in state["ahead"][iteration]]
            uids = list(dict.fromkeys(request["uid"] for request in requests))[mine]
            ahead[iteration] = [request for request in requests if request["uid"] in uids]
        state = {**states[0], "carried": carried[mine], "ahead": ahead}
        self.load_state_dict(state, prepare)
        return len(carried)

    def load_state_dict(self, state: dict[str, Any], prepare: Prepare | None = None) -> None:
        """Restore a `state_dict`; `prepare` is that of the policy, for checkpoints with unprepared observations."""
        self._position = int(state["position"])
        self._has_seen_metric |= bool(state.get("metric_seen", False))
        self._carried = [
            Group(entry["born"], [s if prepare is None else s.prepared(prepare) for s in entry["samples"]])
            for entry in state["carried"]
        ]
        self._ahead = {
            iteration: [EpisodeRequest(**request) for request in requests]
            for iteration, requests in state.get("ahead", {}).items()
        }

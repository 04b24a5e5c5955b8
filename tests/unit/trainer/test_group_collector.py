"""Dynamic sampling: what is kept, dropped, carried on and shared out, on one rank and on several."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlvla.envs import list_tasks
from rlvla.experience import Sample
from rlvla.rollout import EpisodeRequest
from rlvla.rollout.task_sampler import TaskSampler
from rlvla.trainer.algorithm_config import FilterConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.group_collector import Collected, GroupCollector, UnknownMetricError, episode_metric
from rlvla.utils.errors import TrainingHalted
from tests.support.policies import ScriptedPolicy
from tests.support.ranks import ManyRanks, OneRank

GROUP = 4


def played(request: EpisodeRequest, success: bool, truncated: bool = False) -> Sample:
    rewards = torch.tensor([[float(success)]])
    return Sample(
        images=torch.zeros(1, 1, 2, 2, 3, dtype=torch.uint8), proprio=None, instruction="reach",
        actions=torch.zeros(1, 1, 2), executed=torch.ones(1, 1, dtype=torch.bool),
        trace={"tokens": torch.zeros(1, 2, dtype=torch.long)}, log_probs=torch.zeros(1, 2), rewards=rewards,
        reward_components={"success": rewards}, finish_step=1,
        success_once=success, success_at_end=success, terminated=success, truncated=truncated,
        last_images=torch.zeros(1, 2, 2, 3, dtype=torch.uint8), last_proprio=None, uid=request.uid,
        suite=request.suite, task_id=request.task_id, init_state_id=request.init_state_id, seed=request.seed,
    )  # fmt: skip


def position(request: EpisodeRequest) -> int:
    return int(request.uid.removeprefix("group "))


class World:
    """Plays groups whose number of successes is a function of their position, and remembers what was asked."""

    def __init__(self, successes: Callable[[int], int]):
        self._successes = successes
        self.rounds: list[list[int]] = []

    def __call__(self, requests: list[EpisodeRequest]) -> list[Sample]:
        self.rounds.append(list(dict.fromkeys(map(position, requests))))
        return [played(r, i % GROUP < self._successes(position(r))) for i, r in enumerate(requests)]


def collect(groups: GroupCollector, iteration: int, play: Callable[[list[EpisodeRequest]], list[Sample]]) -> Collected:
    """An iteration as the training loop does it."""
    while (requests := groups.plan(iteration)) is not None:
        groups.ingest(play(requests))
    return groups.collected()


def collector(filters: FilterConfig, groups: int = 4, strategy: OneRank | None = None) -> GroupCollector:
    sampler = TaskSampler(list_tasks("toy_reach"), [range(50)], GROUP, seed=0)
    batch = BatchConfig(rollout_batch_size=groups, n_samples_per_prompt=GROUP)
    return GroupCollector(sampler, strategy or OneRank(), batch, filters)


def positions(samples: list[Sample]) -> list[int]:
    found = [int(s.uid.removeprefix("group ")) for s in samples]
    assert all(found.count(p) == GROUP for p in set(found)), "groups stay whole"
    return list(dict.fromkeys(found))


def test_without_filters_every_group_is_played_once() -> None:
    world, groups = World(lambda _: 4), collector(FilterConfig())
    for iteration in range(3):
        got = collect(groups, iteration, world)
        assert positions(got.samples) == list(range(4 * iteration, 4 * iteration + 4))
        assert got.groups == 4 and got.counts["kept_groups"] == 4
    assert len(world.rounds) == 3


def test_playing_goes_on_until_enough_groups_are_kept() -> None:
    """Every third group has mixed outcomes; all others are dropped, each with its reason."""
    world = World(lambda p: 2 if p % 3 == 0 else 0 if p % 3 == 1 else 4)
    groups = collector(FilterConfig(filter_accuracy=True, max_rollout_rounds=9), groups=2)
    got = collect(groups, 0, world)
    assert positions(got.samples) == [0, 3]
    assert world.rounds == [[0, 1], [2], [3]]
    assert got.counts == {
        **{"kept_groups": 2, "carried_groups": 0, "rounds": 3, "dropped_accuracy_low": 1, "dropped_accuracy_high": 1},
        **{"dropped_zero_variance": 0, "dropped_truncated": 0, "dropped_stale": 0, "dropped_incomplete": 0},
        **{"dropped_metric_missing": 0, "dropped_metric_low": 0, "dropped_metric_high": 0},
    }
    assert len(got.played) == 4 * GROUP
    collect(groups, 1, world)
    assert world.rounds[3][0] == 4, "no group is played twice"


def test_accuracy_bounds_are_inclusive() -> None:
    bounds = FilterConfig(filter_accuracy=True, accuracy_lower_bound=0.25, accuracy_upper_bound=0.75)
    got = collect(collector(bounds, groups=3), 0, World(lambda p: [1, 3, 2, 4, 0][p % 5]))
    assert positions(got.samples) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "reason"), [("filter_zero_variance", "zero_variance"), ("filter_truncated", "truncated")]
)
def test_the_other_filters(name: str, reason: str) -> None:
    def play(requests: list[EpisodeRequest]) -> list[Sample]:
        bad = [position(r) % 2 == 1 for r in requests]
        if name == "filter_truncated":
            return [played(r, False, truncated=b and i % GROUP == 0) for i, (r, b) in enumerate(zip(requests, bad))]
        return [played(r, not b and i % GROUP == 0) for i, (r, b) in enumerate(zip(requests, bad))]

    got = collect(collector(FilterConfig(**{name: True}), groups=2), 0, play)
    assert positions(got.samples) == [0, 2]
    assert got.counts[f"dropped_{reason}"] == 1


def test_oversampling_starts_more_and_drops_the_surplus_as_stale() -> None:
    world = World(lambda _: 2)
    groups = collector(FilterConfig(filter_zero_variance=True, oversample_factor=1.5), groups=4)
    got = collect(groups, 0, world)
    assert world.rounds == [[0, 1, 2, 3, 4, 5]]
    assert positions(got.samples) == [0, 1, 2, 3]
    assert got.counts["dropped_stale"] == 2 and got.counts["carried_groups"] == 0
    assert positions(collect(groups, 1, world).samples) == [6, 7, 8, 9]


def test_surplus_groups_are_carried_while_fresh_enough() -> None:
    world = World(lambda _: 2)
    filters = FilterConfig(filter_zero_variance=True, oversample_factor=2.0, max_group_staleness=1)
    groups = collector(filters, groups=2)
    first = collect(groups, 0, world)
    assert positions(first.samples) == [0, 1] and first.counts["carried_groups"] == 2
    second = collect(groups, 1, world)
    assert positions(second.samples) == [2, 3] and second.counts["rounds"] == 0 and second.played == []
    assert positions(collect(groups, 2, world).samples) == [4, 5]
    skipped = collect(groups, 5, world)  # the two carried from iteration 2 are too old by now
    assert positions(skipped.samples) == [8, 9] and skipped.counts["dropped_stale"] == 2


def test_the_state_of_carried_groups_survives_a_checkpoint() -> None:
    filters = FilterConfig(filter_zero_variance=True, oversample_factor=2.0, max_group_staleness=3)
    whole, world = collector(filters, groups=3), World(lambda p: 2 * (p % 3 != 0))
    collect(whole, 0, world)
    resumed = collector(filters, groups=3)
    resumed.load_state_dict(whole.state_dict())
    for iteration in (1, 2):
        one, other = collect(whole, iteration, world), collect(resumed, iteration, world)
        assert positions(one.samples) == positions(other.samples)
        assert one.counts == other.counts


def test_rounds_are_limited() -> None:
    world = World(lambda p: 2 if p == 1 else 0)
    got = collect(collector(FilterConfig(filter_zero_variance=True, max_rollout_rounds=2), groups=3), 0, world)
    assert len(world.rounds) == 2
    assert positions(got.samples) == [1] and got.groups == 1
    none = collect(collector(FilterConfig(filter_zero_variance=True), groups=3), 0, World(lambda _: 0))
    assert none.samples == [] and none.groups == 0 and len(none.played) > 0


def on_ranks(size: int, filters: FilterConfig, groups: int, world: Callable) -> list:
    ranks, results = ManyRanks(size), [None] * size
    makers = [collector(filters, groups, ranks.of(rank)) for rank in range(size)]

    def run(rank: int) -> None:
        results[rank] = collect(makers[rank], 0, world)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert None not in results
    return results


def test_ranks_play_different_groups_equally_often() -> None:
    """Rank 0 is done after its first round and plays on with rank 1, which needs more."""
    world = World(lambda p: 2 if p in (0, 1, 4, 5, 6, 7) else 0)
    results = on_ranks(2, FilterConfig(filter_zero_variance=True), 4, world)
    assert [positions(r.samples) for r in results] == [[0, 1], [6, 7]]
    assert [r.counts["rounds"] for r in results] == [2, 2]
    assert [r.counts["dropped_stale"] for r in results] == [2, 0]


def test_ranks_that_lack_groups_share_out_what_there_is() -> None:
    world = World(lambda p: 2 if p in (0, 1) else 0)
    results = on_ranks(2, FilterConfig(filter_zero_variance=True, max_rollout_rounds=1), 4, world)
    assert [positions(r.samples) for r in results] == [[0], [1]]
    assert [r.groups for r in results] == [2, 2]
    alone = on_ranks(2, FilterConfig(filter_zero_variance=True, max_rollout_rounds=1), 4, World(lambda p: 2 * (p == 0)))
    assert [r.samples for r in alone] == [[], []], "one group cannot be trained on by two ranks"
    # The first rank has four, two of them more than its share, and the second one none.
    world = World(lambda p: 2 if p in (0, 1, 4, 5) else 0)
    results = on_ranks(2, FilterConfig(filter_zero_variance=True, max_rollout_rounds=2), 4, world)
    assert [positions(r.samples) for r in results] == [[0, 4], [1, 5]]
    assert [(r.groups, r.counts["dropped_stale"]) for r in results] == [(4, 0), (4, 0)]


@pytest.mark.parametrize("filters", [FilterConfig(), FilterConfig(filter_truncated=True, max_rollout_rounds=1)])
def test_a_group_of_which_failing_environments_left_one_episode_is_dropped(filters: FilterConfig) -> None:
    """Two episodes can still be compared; one alone cannot."""

    def play(requests: list[EpisodeRequest]) -> list[Sample]:
        left = {0: 4, 1: 1, 2: 2, 3: 4}
        return [played(r, True) for i, r in enumerate(requests) if i % GROUP < left[position(r)]]

    got = collect(collector(filters), 0, play)
    assert [s.uid for s in got.samples].count("group 2") == 2
    assert {s.uid for s in got.samples} == {"group 0", "group 2", "group 3"}
    assert got.counts["dropped_incomplete"] == 1 and got.counts["kept_groups"] == 3
    assert len(got.played) == 11


def test_waiting_groups_are_dealt_out_to_another_number_of_ranks() -> None:
    filters = FilterConfig(filter_zero_variance=True, oversample_factor=3.0, max_group_staleness=1)
    one = collector(filters, groups=2)
    collect(one, 0, World(lambda _: 2))
    ranks = [collector(filters, 2, ManyRanks(2).of(rank)) for rank in range(2)]
    for rank in ranks:
        rank.reshard_state([one.state_dict()], ScriptedPolicy(1, 2).prepare)
    waiting = [[positions(entry["samples"])[0] for entry in rank.state_dict()["carried"]] for rank in ranks]
    assert waiting == [[2, 4], [3, 5]]
    assert [rank.state_dict()["position"] for rank in ranks] == [6, 6]


def test_filters_see_whole_samples_only() -> None:
    """A carried group keeps its episodes and their fields."""
    world = World(lambda _: 2)
    groups = collector(FilterConfig(filter_zero_variance=True, oversample_factor=2.0, max_group_staleness=1), groups=1)
    collect(groups, 0, world)
    (entry,) = groups.state_dict()["carried"]
    assert entry["born"] == 0 and len(entry["samples"]) == GROUP
    assert all(dataclasses.is_dataclass(sample) for sample in entry["samples"])


def test_an_iteration_that_is_broken_off_leaves_nothing_behind() -> None:
    """Before and after its groups were handed over, up to `commit`: greedy baselines are played in between."""
    filters = FilterConfig(filter_zero_variance=True, oversample_factor=3.0, max_group_staleness=1)
    groups = collector(filters, groups=2)
    collect(groups, 0, World(lambda _: 2))
    groups.commit()
    before = groups.state_dict()
    assert before["carried"]
    world = World(lambda _: 2)
    groups.ingest(world(groups.plan(1) or []))
    groups.abandon()
    assert groups.state_dict() == before
    first = collect(groups, 1, world)
    assert groups.state_dict() != before
    groups.abandon()
    assert groups.state_dict() == before
    assert positions(collect(groups, 1, world).samples) == positions(first.samples)
    groups.commit()
    groups.abandon()
    assert groups.state_dict() != before, "what has been trained on is not forgotten"


def test_groups_are_filtered_by_any_number_of_their_episodes() -> None:
    """Groups whose position is a multiple of three need few steps; a reward function reports how many."""

    def play(requests: list[EpisodeRequest]) -> list[Sample]:
        return [
            dataclasses.replace(played(r, True), reward_info={"reward_fn_steps": float(position(r) % 3)})
            for r in requests
        ]

    filters = FilterConfig(filter_metric="reward_fn_steps", filter_metric_range=(0.0, 0.5), max_rollout_rounds=9)
    got = collect(collector(filters, groups=2), 0, play)
    assert positions(got.samples) == [0, 3]
    assert got.counts["dropped_metric_high"] == 2 and got.counts["dropped_metric_low"] == 0


def test_a_number_that_no_episode_has() -> None:
    groups = collector(FilterConfig(filter_metric="reward_fn_absent", filter_metric_range=(0.0, 1.0)))
    with pytest.raises(UnknownMetricError, match="reward_fn_absent.*score.*success") as raised:
        collect(groups, 0, World(lambda _: 2))
    assert isinstance(raised.value, TrainingHalted) and groups.state_dict()["position"] == 0


def fast_successes(requests: list[EpisodeRequest]) -> list[Sample]:
    """A reward function that reports a speed of successful episodes only; the groups 1, 4, 7... have failures."""
    episodes = [played(r, position(r) % 3 != 1 or i % GROUP == 0) for i, r in enumerate(requests)]
    return [dataclasses.replace(e, reward_info={"reward_fn_speed": 1.0}) if e.success_at_end else e for e in episodes]


def test_groups_with_an_episode_without_the_number_are_dropped() -> None:
    filters = FilterConfig(filter_metric="reward_fn_speed", filter_metric_range=(0.0, 2.0), max_rollout_rounds=9)
    got = collect(collector(filters, groups=2), 0, fast_successes)
    assert positions(got.samples) == [0, 2]
    assert got.counts["dropped_metric_missing"] == 1 and got.counts["dropped_metric_low"] == 0


def test_a_number_that_was_reported_before_a_resume_may_be_missing() -> None:
    filters = FilterConfig(filter_metric="reward_fn_speed", filter_metric_range=(0.0, 2.0), max_rollout_rounds=1)
    whole, resumed = collector(filters, groups=2), collector(filters, groups=2)
    collect(whole, 0, fast_successes)
    resumed.load_state_dict(whole.state_dict())
    for groups in (whole, resumed):
        assert collect(groups, 1, World(lambda _: 0)).groups == 0


@pytest.mark.parametrize("successful_rank", [None, 1])
def test_ranks_end_together_if_none_has_the_number(successful_rank: int | None) -> None:
    filters = FilterConfig(filter_metric="reward_fn_speed", filter_metric_range=(0.0, 2.0), max_rollout_rounds=1)
    ranks = ManyRanks(2)

    def work(rank: int) -> str:
        groups = collector(filters, groups=2, strategy=ranks.of(rank))
        play = fast_successes if rank == successful_rank else World(lambda _: 0)
        try:
            return str(int(collect(groups, 0, play).counts["dropped_metric_missing"]))
        except TrainingHalted:
            return "halted"

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(work, range(2)))
    assert outcomes == (["halted", "halted"] if successful_rank is None else ["1", "1"])


@pytest.mark.parametrize(
    ("name", "value"), [("score", 1.0), ("success", 1.0), ("success_once", 1.0), ("episode_length", 1.0)]
)
def test_numbers_that_every_episode_has(name: str, value: float) -> None:
    (request,) = TaskSampler(list_tasks("toy_reach"), [range(50)], 1, seed=0).at(range(1))
    assert episode_metric(played(request, True), name) == value


@pytest.mark.parametrize("filters", [FilterConfig(), FilterConfig(filter_accuracy=True, max_rollout_rounds=9)])
def test_what_was_planned_ahead_is_the_first_round(filters: FilterConfig) -> None:
    """Also after a break, and after an iteration that is repeated; no group is lost or played twice."""
    world, groups = World(lambda p: 2 if p % 3 else 0), collector(filters, groups=4)
    collect(groups, 0, world)
    groups.commit()
    first, second = groups.plan_ahead(1), groups.plan_ahead(2)
    assert groups.plan_ahead(2) == second
    state = groups.state_dict()
    assert groups.plan(1) == first
    groups.abandon()  # a signal; the iteration is repeated
    assert groups.state_dict() == state
    resumed = collector(filters, groups=4)
    resumed.load_state_dict(state)
    for later in (groups, resumed):
        played_before = list(world.rounds)
        for iteration, planned in ((1, first), (2, second)):
            rounds = len(world.rounds)
            got = collect(later, iteration, world)
            later.commit()
            assert world.rounds[rounds] == list(dict.fromkeys(map(position, planned)))
            assert len(got.samples) == 4 * GROUP
        assert "ahead" not in later.state_dict()
        asked = [p for r in world.rounds for p in r] if later is groups else []
        assert len(asked) == len(set(asked)), "no group is played twice"
        world.rounds[:] = played_before


def test_rounds_planned_ahead_go_to_other_ranks() -> None:
    ranks = [collector(FilterConfig(), groups=4, strategy=strategy) for strategy in map(ManyRanks(2).of, range(2))]
    planned = [position(r) for rank in ranks for r in rank.plan_ahead(1)[::GROUP]]
    alone = collector(FilterConfig(), groups=4)
    alone.reshard_state([rank.state_dict() for rank in ranks])
    requests = alone.plan(1)
    assert requests is not None and [position(r) for r in requests[::GROUP]] == planned == [4, 5, 6, 7]
    back = [collector(FilterConfig(), groups=4, strategy=strategy) for strategy in map(ManyRanks(2).of, range(2))]
    again = collector(FilterConfig(), groups=4)
    again.plan_ahead(1)
    for rank in back:
        rank.reshard_state([again.state_dict()])
    dealt = [[position(r) for r in (rank.plan(1) or [])[::GROUP]] for rank in back]
    assert dealt == [[4, 6], [5, 7]]

"""Which episodes an iteration plays."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from rlvla.envs import list_tasks
from rlvla.rollout import EpisodeRequest
from rlvla.rollout.task_sampler import TaskSampler, parse_task_weights
from rlvla.utils.errors import ConfigError

TASKS = [*list_tasks("toy_reach"), *list_tasks("robosuite")]
STATES = [range(5), range(10, 13)]  # 8 instances


def sampler(n: int = 1, seed: int = 0) -> TaskSampler:
    return TaskSampler(TASKS, STATES, n, seed)


def instances(requests: list[EpisodeRequest]) -> list[tuple[str, int]]:
    return [(r.suite, r.init_state_id) for r in requests]


def test_every_instance_comes_once_before_any_comes_again() -> None:
    drawn = [i for it in range(8) for i in instances(sampler().draw(it, range(3), 3))]
    everything = {("toy_reach", s) for s in range(5)} | {("robosuite", s) for s in range(10, 13)}
    for epoch in range(3):
        assert set(drawn[8 * epoch : 8 * epoch + 8]) == everything
    assert drawn[:8] != drawn[8:16], "each pass has an order of its own"


def test_groups_share_the_instance_and_the_uid_and_differ_in_the_seed() -> None:
    requests = sampler(n=4).draw(2, range(3), 3)
    assert len(requests) == 12
    for group in range(3):
        members = requests[4 * group : 4 * group + 4]
        assert len({(r.suite, r.task_id, r.init_state_id, r.uid) for r in members}) == 1
    assert len({r.uid for r in requests}) == 3
    assert len({r.seed for r in requests}) == 12


def test_ranks_share_out_the_groups_of_one_rank() -> None:
    whole = sampler(n=2).draw(1, range(6), 6)
    first, second = (sampler(n=2).draw(1, groups, 6) for groups in (range(3), range(3, 6)))
    assert first + second == whole
    assert not {r.uid for r in first} & {r.uid for r in second}


def test_an_iteration_depends_on_seed_and_number_alone() -> None:
    walked = sampler()
    for iteration in range(7):
        last = walked.draw(iteration, range(3), 3)
    assert sampler().draw(6, range(3), 3) == last
    assert sampler(seed=1).draw(6, range(3), 3) != last


def test_seeds_and_uids_never_repeat_in_a_run() -> None:
    requests = [r for it in range(20) for r in sampler(n=2).draw(it, range(4), 4)]
    assert len({r.seed for r in requests}) == len(requests)
    assert set(Counter(r.uid for r in requests).values()) == {2}


def test_weights_draw_tasks_by_their_shares_and_states_evenly() -> None:
    drawn = Counter(instances(TaskSampler(TASKS, STATES, 1, 0, weights=[1.0, 3.0]).at(range(4000))))
    of_first = sum(count for (suite, _), count in drawn.items() if suite == "toy_reach")
    assert abs(of_first / 4000 - 0.25) < 0.03
    assert all(abs(count - 1000) < 120 for (suite, _), count in drawn.items() if suite == "robosuite")
    assert {suite for suite, _ in instances(TaskSampler(TASKS, STATES, 1, 0, weights=[0, 1]).at(range(99)))} == {
        "robosuite"
    }


def test_weighted_draws_depend_on_seed_and_position_alone() -> None:
    whole = TaskSampler(TASKS, STATES, 2, 0, weights=[1.0, 3.0]).at(range(20))
    assert TaskSampler(TASKS, STATES, 2, 0, weights=[1.0, 3.0]).at(range(7, 20)) == whole[14:]


def test_parsing_weights() -> None:
    tasks = [dataclasses.replace(TASKS[0], task_id=number) for number in range(3)]
    assert parse_task_weights((), tasks) is None
    assert parse_task_weights(("2:0.5", "0:0"), tasks) == [0.0, 1.0, 0.5]
    for specs, reasons in (
        (("1", "x:2", "1:y"), ["malformed"] * 3),
        (("7:1", "0:-1", "1:nan", "2:inf"), ["unknown_name", *["out_of_range"] * 3]),
        (("0:1", "0:2"), ["duplicate"]),
        (("0:0", "1:0", "2:0"), ["out_of_range"]),
    ):
        with pytest.raises(ConfigError) as error:
            parse_task_weights(specs, tasks)
        assert [(p.flag, p.reason) for p in error.value.problems] == [("task_weights", r) for r in reasons]

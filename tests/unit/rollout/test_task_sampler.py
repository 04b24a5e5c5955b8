"""Which episodes an iteration plays."""

from __future__ import annotations

from collections import Counter

from rlvla.envs import list_tasks
from rlvla.rollout import EpisodeRequest
from rlvla.rollout.task_sampler import TaskSampler

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

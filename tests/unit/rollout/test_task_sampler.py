"""Which episodes an iteration plays."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from rlvla.algorithms import curricula
from rlvla.envs import list_tasks
from rlvla.rollout import EpisodeRequest, FinishedEpisode
from rlvla.rollout.config import TaskSamplingConfig
from rlvla.rollout.task_sampler import (
    CurriculumSampler,
    TaskSampler,
    TaskSamplerError,
    make_sampler,
    parse_task_weights,
)
from rlvla.utils.errors import ConfigError

TASKS = [*list_tasks("toy_reach"), list_tasks("robosuite")[0]]
STATES = [range(5), range(10, 13)]  # 8 instances


def sampler(n: int = 1, seed: int = 0) -> TaskSampler:
    return TaskSampler(TASKS, STATES, n, seed)


def draw(sampler: TaskSampler, iteration: int, groups: range, number: int) -> list[EpisodeRequest]:
    """Some of the `number` groups of an iteration."""
    first = iteration * number
    return sampler.at(range(first + groups.start, first + groups.stop))


def instances(requests: list[EpisodeRequest]) -> list[tuple[str, int]]:
    return [(r.suite, r.init_state_id) for r in requests]


def test_every_instance_comes_once_before_any_comes_again() -> None:
    drawn = [i for it in range(8) for i in instances(draw(sampler(), it, range(3), 3))]
    everything = {("toy_reach", s) for s in range(5)} | {("robosuite", s) for s in range(10, 13)}
    for epoch in range(3):
        assert set(drawn[8 * epoch : 8 * epoch + 8]) == everything
    assert drawn[:8] != drawn[8:16], "each pass has an order of its own"


def test_groups_share_the_instance_and_the_uid_and_differ_in_the_seed() -> None:
    requests = draw(sampler(n=4), 2, range(3), 3)
    assert len(requests) == 12
    for group in range(3):
        members = requests[4 * group : 4 * group + 4]
        assert len({(r.suite, r.task_id, r.init_state_id, r.uid) for r in members}) == 1
    assert len({r.uid for r in requests}) == 3
    assert len({r.seed for r in requests}) == 12


def test_ranks_share_out_the_groups_of_one_rank() -> None:
    whole = draw(sampler(n=2), 1, range(6), 6)
    first, second = (draw(sampler(n=2), 1, groups, 6) for groups in (range(3), range(3, 6)))
    assert first + second == whole
    assert not {r.uid for r in first} & {r.uid for r in second}


def test_an_iteration_depends_on_seed_and_number_alone() -> None:
    walked = sampler()
    for iteration in range(7):
        last = draw(walked, iteration, range(3), 3)
    assert draw(sampler(), 6, range(3), 3) == last
    assert draw(sampler(seed=1), 6, range(3), 3) != last


def test_seeds_and_uids_never_repeat_in_a_run() -> None:
    requests = [r for it in range(20) for r in draw(sampler(n=2), it, range(4), 4)]
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
    tasks = [dataclasses.replace(TASKS[0], task_id=number, name=f"task_{number}") for number in range(3)]
    assert parse_task_weights((), tasks) is None
    assert parse_task_weights(("task_2:0.5", "0:0"), tasks) == [0.0, 1.0, 0.5]
    assert parse_task_weights(("2:0.5", "0:0"), tasks) == [0.0, 1.0, 0.5]
    for specs, reasons in (
        (("1", ":2", "1:y"), ["malformed"] * 3),
        (("7:1", "x:2", "0:-1", "1:nan", "2:inf"), [*["unknown_name"] * 2, *["out_of_range"] * 3]),
        (("0:1", "0:2"), ["duplicate"]),
        (("0:1", "task_0:2"), ["duplicate"]),
        (("0:0", "1:0", "2:0"), ["out_of_range"]),
    ):
        with pytest.raises(ConfigError) as error:
            parse_task_weights(specs, tasks)
        assert [(p.flag, p.reason) for p in error.value.problems] == [("task_weights", r) for r in reasons]
    with pytest.raises(ConfigError, match="did you mean task_"):
        parse_task_weights(("tsk_2:1",), tasks)
    with pytest.raises(ConfigError, match=r"there are task_0 \(0\), task_1"):
        parse_task_weights(("12:1",), tasks)


# ------------------------------------------------------------------------------------------------------- curricula
PAIR = list_tasks("toy_push")[:2]


def curriculum(**settings: object) -> CurriculumSampler:
    config = TaskSamplingConfig(**{"task_sampling": "inverse_success", **settings})
    made = make_sampler(config, PAIR, STATES, 2, seed=3)
    assert isinstance(made, CurriculumSampler)
    return made


def finished(task: int, outcomes: list[bool]) -> list[FinishedEpisode]:
    spec = PAIR[task]
    return [FinishedEpisode(spec.suite, spec.task_id, 0, 1, "u", True, end, 5, 0) for end in outcomes]


def share_of_the_first(made: CurriculumSampler, groups: int = 1500) -> float:
    drawn = made.at(range(groups))[::2]
    assert all(r.init_state_id in STATES[0 if r.task_id == PAIR[0].task_id else 1] for r in drawn)
    return sum(r.task_id == PAIR[0].task_id for r in drawn) / groups


def test_without_a_curriculum_nothing_changes() -> None:
    made = make_sampler(TaskSamplingConfig(), TASKS, STATES, 1, seed=0)
    assert made.at(range(8)) == sampler().at(range(8)) and not made.observes and made.state_dict() is None


def test_tasks_that_fail_are_drawn_more_often() -> None:
    made = curriculum(task_sampling_floor=0.2)
    assert share_of_the_first(made) == pytest.approx(0.5, abs=0.05), "nothing is known yet"
    made.observe([*finished(0, [True] * 9 + [False]), *finished(1, [False] * 9 + [True])])
    # 0.8 x (0.1, 0.9) + 0.2 x (1/2, 1/2)
    assert share_of_the_first(made) == pytest.approx(0.18, abs=0.05)


def test_a_curriculum_of_ones_own_that_fails_ends_the_run_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curricula.TASK_SAMPLINGS, "_entries", dict(curricula.TASK_SAMPLINGS._entries))

    @curricula.register_task_sampling("late")
    def late(success: curricula.TaskSuccess) -> np.ndarray:
        return np.ones(2) if not success.episodes.any() else success.means

    made = curriculum(task_sampling="late")
    with pytest.raises(TaskSamplerError, match=r"(?s)task sampling 'late' failed:\n.*, in late\n.* 'means'"):
        made.observe(finished(0, [True]))

    @curricula.register_task_sampling("never")
    def never(success: curricula.TaskSuccess) -> np.ndarray:
        return np.ones(3)

    with pytest.raises(ConfigError, match="must return 2 finite weights"):
        curriculum(task_sampling="never")


def test_weights_are_factors_of_a_curriculum() -> None:
    made = curriculum(task_weights=(f"{PAIR[0].task_id}:1",))
    plain = share_of_the_first(made)
    config = TaskSamplingConfig(task_sampling="inverse_success")
    heavy = CurriculumSampler(PAIR, STATES, 2, 3, [3.0, 1.0], config)
    assert plain == pytest.approx(0.5, abs=0.05) and share_of_the_first(heavy) == pytest.approx(0.75, abs=0.03)


def test_a_curriculum_goes_on_from_its_state_and_ranks_agree() -> None:
    made, other = curriculum(task_sampling="learning_progress"), curriculum(task_sampling="learning_progress")
    for end in (False, True, True):
        made.observe([*finished(0, [end] * 6), *finished(1, [False] * 6)])
    state = json.loads(json.dumps(made.state_dict()))
    assert other.at(range(50)) != made.at(range(50))
    other.load_state_dict(state)
    assert other.at(range(50)) == made.at(range(50)) == [*made.at(range(20)), *made.at(range(20, 50))]
    assert other.state_dict() == state
    assert share_of_the_first(made) > 0.8, "the other task does not move"

"""Paired comparisons: gained and lost episodes, and protocols that cannot be paired."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from scipy.stats import binom

from rlvla.envs import list_tasks
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.evaluation.comparison import compare, compare_over_runs
from rlvla.evaluation.protocol import describe_differences, describe_protocol
from rlvla.evaluation.report import EvaluationReport, PolicyEvaluation, SuiteEvaluation
from rlvla.evaluation.results import EpisodeOutcome, EvalResult, Rate, summarize
from rlvla.evaluation.statistics import tango_interval, wilson_interval

TOY = list_tasks("toy_reach")[0]
TWO = [TOY, replace(TOY, task_id=1, name="reach again")]


def result(successes: list[bool], states: list[int] | None = None) -> EvalResult:
    states = states or list(range(len(successes)))
    outcomes = [EpisodeOutcome(0, state, s, True, 5) for state, s in zip(states, successes)]
    return summarize(outcomes, [TOY], "heldout", True)


def test_pairs_are_formed_by_initial_state() -> None:
    # Policy: states 0-7; baseline: only 0 and 9. Both lists are shuffled differently.
    own = result([False, True, True, True, True, True, True, True, True, False], [9, 7, 6, 5, 4, 3, 2, 1, 0, 8])
    base = result([True] + [False] * 8 + [True])
    comparison = compare("new", own, "old", base)
    at_end, once = comparison.overall(), comparison.overall("success_once")
    assert (at_end.n, at_end.gained, at_end.lost) == (10, 7, 1)
    assert at_end.difference == pytest.approx(0.6)
    assert at_end.p_value == pytest.approx(2 * binom.cdf(1, 8, 0.5))
    assert 0.0 < at_end.low < 0.6 < at_end.high <= 1.0
    assert (once.difference, once.gained, once.p_value) == (0.0, 0, 1.0)
    assert comparison.lost_states == ((0, 9),)
    text = comparison.as_table()
    assert "new minus old (greedy" in text and "+60.0 [" in text and "exact McNemar" in text
    assert "score interval (Tango)" in text and "bootstrap" not in text


def test_no_paired_difference_is_shown_as_certain() -> None:
    """Nothing discordant, and everything gained: a bootstrap would be a single point."""
    equal = compare("a", result([True, False] * 5), "b", result([True, False] * 5)).overall()
    assert (equal.low, equal.high) == pytest.approx((-0.2775, 0.2775), abs=1e-4)
    gained = compare("a", result([True] * 10), "b", result([False] * 10)).overall()
    assert (gained.low, gained.high) == pytest.approx((0.4449, 1.0), abs=1e-4)
    assert equal.bootstrap is gained.bootstrap is None


def test_the_bootstrap_stands_beside_the_interval_where_it_means_something() -> None:
    own, base = [True] * 30 + [False] * 20, [False] * 20 + [True] * 20 + [False] * 10
    comparison = compare("a", result(own), "b", result(base))
    overall = comparison.overall()
    assert overall.bootstrap == pytest.approx((overall.low, overall.high), abs=0.04)
    assert comparison.as_dict()["differences"][0]["bootstrap"] == overall.bootstrap


def test_an_episode_that_one_side_lacks_is_no_pair() -> None:
    assert compare("a", result([True] * 5), "b", result([True, False, True])).overall().n == 3


def test_episodes_that_only_one_side_could_play_make_no_pair() -> None:
    comparison = compare("a", result([True], [0]), "b", result([True], [1]))
    assert not comparison.paired and comparison.overall().p_value is None
    assert "no initial state from which both could be played" in comparison.note()
    # Of the second task each side has what the other lacks: it gets no row.
    own, base = (
        summarize([EpisodeOutcome(0, 0, True, True, 5), EpisodeOutcome(1, state, True, True, 5)], TWO, "heldout", True)
        for state in (0, 1)
    )
    comparison = compare("a", own, "b", base)
    assert comparison.paired and [(d.task, d.n) for d in comparison.differences[:2]] == [(TOY.name, 1), ("all", 1)]


def test_different_protocols_are_never_paired_and_say_so() -> None:
    comparison = compare("a", result([True] * 40), "b", result([False] * 30), ["seed 0 and 1"])
    overall = comparison.overall()
    assert overall.p_value is overall.gained is None and not comparison.lost_states and not comparison.paired
    assert overall.n == 30 and overall.low > 0.7
    assert "THE PROTOCOLS DIFFER" in comparison.as_table() and "seed 0 and 1" in comparison.as_table()


def test_every_difference_between_protocols_is_named() -> None:
    own = describe_protocol([TOY], SplitConfig(), 10, 0, 1.0)
    assert describe_differences(own, copy.deepcopy(own)) == []
    shared = describe_protocol([TOY], SplitConfig(eval_protocol="shared"), 10, 1, 1.5)
    text = "; ".join(describe_differences(own, shared))
    assert all(word in text for word in ("name heldout and shared", "seed 0 and 1", "temperature", "initial states"))
    slower = describe_protocol(list_tasks("toy_reach", max_steps=20), SplitConfig(), 10, 0, 1.0)
    assert describe_differences(own, slower) == ["max_steps of reach 12 and 20"]
    longer = describe_protocol([TOY], SplitConfig(), 10, 0, 1.0, success_hold_steps=5)
    assert describe_differences(own, longer) == ["success_hold_steps None and 5"]
    other = describe_protocol([TOY], SplitConfig(), 10, 0, 1.0) | {"tasks": []}
    assert describe_differences(own, other) == ["tasks [0] and []"]
    options = {"physics": "gpu", "kinds": ["a", "b"]}
    played = describe_protocol([TOY], SplitConfig(), 10, 0, 1.0, options=options)
    assert describe_differences(played, json.loads(json.dumps(played))) == []
    assert describe_differences(own, played) == ["kinds: its default and ['a', 'b']", "physics: its default and gpu"]


@pytest.mark.parametrize(
    ("suite", "options", "played"),
    [
        ("maniskill", {"physics": "gpu", "object_state": True}, {"physics": "gpu"}),
        ("maniskill", {"physics": "cpu"}, {}),
        ("gym:CartPole-v1", {"gym_success": "terminated"}, {"gym_success": "terminated"}),
        ("robosuite", {"dense_reward": True, "object_state": True, "action_space": "primitives"}, {}),
        ("robosuite", {"perturb": ("light=1",)}, {}),
        ("libero_10", {"libero_assets": "of this machine"}, {}),
    ],
)
def test_options_that_affect_episodes_belong_to_the_protocol(
    suite: str, options: dict[str, Any], played: dict[str, Any]
) -> None:
    assert EnvConfig(task_suite_name=suite, options=options).played_options == played


def over_tasks(solved: dict[int, int], unseen: tuple[int, ...] = ()) -> EvalResult:
    """Five tasks of ten states each, of which the first so many are solved."""
    tasks = list_tasks("metaworld")[:5]
    outcomes = [EpisodeOutcome(t.task_id, s, s < solved[t.task_id], True, 9) for t in tasks for s in range(10)]
    return replace(summarize(outcomes, tasks, "heldout", True), unseen_tasks=unseen)


def test_seen_and_unseen_tasks_stand_apart() -> None:
    seen_tasks, unseen_tasks = {0: 9, 1: 10, 2: 8}, {3: 1, 4: 5}
    result = over_tasks(seen_tasks | unseen_tasks, unseen=(3, 4))
    assert result.task_groups == {"seen tasks": frozenset({0, 1, 2}), "unseen tasks": frozenset({3, 4})}
    rows = {row[0]: row for row in result.rows()}
    assert list(rows)[-3:] == ["seen tasks (3)", "unseen tasks (2)", "all"]
    groups = [result.of_tasks(name, ids).success_at_end for name, ids in result.task_groups.items()]
    assert [(group.rate, group.n) for group in groups] == [(0.9, 30), (0.3, 20)]
    wilson = wilson_interval(6, 20)
    assert groups[1].low < wilson[0] and groups[1].high > wilson[1], "two tasks that differ say little of others"
    assert EvalResult.from_dict(json.loads(json.dumps(result.as_dict()))) == result
    base = over_tasks({0: 9, 1: 9, 2: 9, 3: 5, 4: 5})
    assert "unseen_tasks" not in base.as_dict() and not base.task_groups
    comparison = compare("own", result, "base", base)
    by_task = {d.task: d for d in comparison.differences if d.measure == "success_at_end"}
    seen, unseen = by_task["seen tasks"], by_task["unseen tasks"]
    assert (unseen.gained, unseen.lost, unseen.n, seen.gained, seen.lost) == (0, 4, 20, 1, 1)
    assert list(by_task)[-1] == "all"
    low, high = tango_interval(0, 4, 20)
    assert unseen.low < low and unseen.high > high, "one task lost, one did not"
    assert unseen.p_value is None and by_task["all"].p_value is not None
    assert "over seen tasks and unseen tasks clustered by task" in comparison.note()
    unpaired = compare("own", result, "base", base, ["seed 0 and 1"]).differences
    assert "unseen tasks" not in {d.task for d in unpaired} and unpaired[-1].task == "all"


def test_unseen_tasks_alone_have_their_interval_over_tasks() -> None:
    result = over_tasks({0: 10, 1: 5, 2: 0, 3: 0, 4: 0}, unseen=(0, 1, 2, 3, 4))
    assert [row[0] for row in result.rows()][-2:] == ["unseen tasks (5)", "all"]
    rate = result.of_tasks("unseen tasks", result.task_groups["unseen tasks"]).success_at_end
    assert rate.rate == result.success_at_end.rate == 0.3
    assert rate.low < result.success_at_end.low - 0.1 and rate.high > result.success_at_end.high + 0.1
    assert not replace(result, tasks=result.tasks[:1]).task_groups, "one task says nothing of others"


def test_a_group_of_tasks_of_which_some_were_not_played() -> None:
    """All episodes of a task can be dropped, and a baseline may know other tasks."""
    result = over_tasks({0: 9, 1: 10, 2: 8, 3: 1, 4: 5}, unseen=(3, 4))
    kept = tuple(task for task in result.tasks if task.task_id != 3)
    fewer = replace(result, tasks=kept, episodes=tuple(e for e in result.episodes if e.task_id != 3))
    assert fewer.task_groups["unseen tasks"] == {4}
    assert "unseen tasks (1)" in fewer.as_table()
    none = replace(fewer, tasks=fewer.tasks[:3], episodes=tuple(e for e in fewer.episodes if e.task_id < 3))
    assert not none.task_groups and "seen tasks" not in none.as_table()
    protocols = {"greedy": describe_protocol(list_tasks("metaworld")[:5], SplitConfig(), 10, 0, 1.0)}
    suites = {}
    for name in ("metaworld", "metaworld, camera=1"):
        base = PolicyEvaluation("sft", {}, {"greedy": protocols["greedy"] | {"seed": 1}}, [none])
        suites[name] = SuiteEvaluation.of(PolicyEvaluation("rl", {}, protocols, [result]), [base])
    rows = {row[0]: row[1:] for row in EvaluationReport.of(suites).conditions}
    assert rows["metaworld: unseen tasks"][1:] == ("-", "-")
    assert rows["metaworld: seen tasks"][1].startswith("90.0%")


def test_runs_from_the_same_states_are_not_counted_as_so_many_states() -> None:
    own, base = [True] * 60 + [False] * 40, [True] * 20 + [False] * 80
    once = compare("a", result(own), "b", result(base)).overall()
    thrice = compare_over_runs([(result(own), result(base))] * 3)
    assert (thrice.n, thrice.gained, thrice.lost) == (300, 120, 0)
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high), abs=0.005)
    rate = Rate.over_runs([result(own)] * 3)
    assert (rate.rate, rate.n) == (0.6, 300)
    assert (rate.low, rate.high) == pytest.approx(wilson_interval(60, 100), abs=0.005)
    with pytest.raises(ValueError, match="no initial state in common"):
        compare_over_runs([(result([True], [1]), result([True], [2]))])


def test_conditions_of_a_suite_are_compared_in_one_table() -> None:
    """Success of both policies and their paired difference, over all tasks and over seen and unseen ones."""
    protocols = {"greedy": describe_protocol(list_tasks("metaworld")[:5], SplitConfig(), 10, 0, 1.0)}
    solved = {"metaworld": {0: 9, 1: 10, 2: 8, 3: 1, 4: 5}, "metaworld, camera=1": {0: 2, 1: 2, 2: 2, 3: 0, 4: 0}}
    start = {0: 9, 1: 9, 2: 9, 3: 5, 4: 5}
    suites = {}
    for name, own in solved.items():
        policies = [
            PolicyEvaluation("rl", {}, protocols, [over_tasks(own, unseen=(3, 4))]),
            PolicyEvaluation("sft", {}, protocols, [over_tasks(start)]),
        ]
        suites[name] = SuiteEvaluation.of(policies[0], policies[1:])
    header, *rows = EvaluationReport.of(suites).conditions
    assert header == ("condition", "rl, greedy", "sft, greedy", "difference to sft, greedy")
    names = [f"{name}{group}" for name in solved for group in ("", ": seen tasks", ": unseen tasks")]
    assert [row[0] for row in rows] == names
    assert [row[1].split()[0] for row in rows] == ["66.0%", "90.0%", "30.0%", "12.0%", "20.0%", "0.0%"]
    assert [row[3].split()[0] for row in rows] == ["-8.0", "+0.0", "-20.0", "-62.0", "-70.0", "-50.0"]
    alone = {name: SuiteEvaluation.of(suite.own) for name, suite in suites.items()}
    assert [len(row) for row in EvaluationReport.of(alone).conditions] == [2] * 7

"""Reward sources: life cycle, weights and schedules, success, late rewards, dynamic truncation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from rlvla.envs import list_tasks
from rlvla.rewards import RewardConfig, RewardPlan, StepInfo, parse_rewards, register_reward, reward_names
from rlvla.rewards import base as base_module
from rlvla.rewards.base import EpisodeStart
from rlvla.rewards.machine_source import MachineSource
from rlvla.rewards.schedule import fraction_done, parse_schedules
from rlvla.rewards.truncation import ProgressWatch
from rlvla.utils.errors import ConfigError
from tests.support.reward_cases import make_chunk, make_task, play

TASK = make_task(propositions=("grasped", "lifted"))
NOTHING: list[set[str]] = [set(), set(), set()]


def test_success_pays_once_at_the_terminating_step() -> None:
    plan = RewardPlan({"success": 2.0}, RewardConfig.from_flags(reward_coef=2.5))
    chunks = [
        make_chunk(NOTHING, 4, successes=[False, True, False]),
        make_chunk(NOTHING, 4, successes=[True] * 3, terminated=True),
    ]
    sample, _ = play(plan, TASK, chunks)
    assert sample.reward_components["success"].tolist() == [[0, 0, 0, 0], [0, 0, 5, 0]], "2.0 x 2.5, at the end alone"
    assert sample.reward_info == {"success_regressions": 1}


def test_truncation_is_not_success() -> None:
    sample, _ = play(RewardPlan({"success": 1.0}), TASK, [make_chunk(NOTHING, successes=[True] * 3, truncated=True)])
    assert not sample.rewards.any()


def test_success_once_pays_the_first_time() -> None:
    plan = RewardPlan({"success": 1.0}, RewardConfig.from_flags(success_reward="once"))
    chunk = make_chunk([set()] * 5, successes=[False, True, False, True, True], terminated=True)
    assert play(plan, TASK, [chunk])[0].rewards.tolist() == [[0, 1, 0, 0, 0]]


class Recorder:
    """Notes what happens to it; its rewards are known at once, or come when the episode is over."""

    log: list = []
    late = False

    def __init__(self, config: RewardConfig):
        self.log.append("made")

    def create(self, task, episode):
        self.log.append((task, episode.observation is not None))
        return RecorderEpisode(self.log, self.late)


class RecorderEpisode:
    def __init__(self, log: list, late: bool):
        self.log, self.late, self.steps = log, late, 0

    def step(self, observation, events, info):
        self.log.append((observation is not None, events, info))
        self.steps += 1
        return None if self.late else 2.0

    def finish(self):
        rewards = {"rewards": np.arange(self.steps)} if self.late else {}
        return {"steps": self.steps, **rewards}

    def release(self):
        self.log.append("released")


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recorder]]:
    monkeypatch.setattr(base_module.REWARDS, "_entries", dict(base_module.REWARDS._entries))
    monkeypatch.setattr(Recorder, "log", [])
    monkeypatch.setattr(Recorder, "late", False)
    register_reward("recorder")(Recorder)
    return Recorder


def test_life_of_a_source(recorder: type[Recorder]) -> None:
    assert "recorder" in reward_names()
    plan = RewardPlan.from_config(RewardConfig(reward=("success", "recorder:0.5")))
    sample, _ = play(plan, TASK, [make_chunk([{"grasped"}, set()], 3, successes=[False, True], truncated=True)])
    assert sample.reward_components["recorder"].tolist() == [[1.0, 1.0, 0.0]]
    assert sample.reward_info["recorder_steps"] == 2
    assert recorder.log == [
        "made",
        (TASK, True),
        (False, frozenset({"grasped"}), StepInfo(False, False, False)),
        (True, frozenset(), StepInfo(True, False, True)),
        "released",
    ]


@pytest.mark.parametrize("name", ["query_final_frame", "look_at_end"])
def test_hook_before_the_final_frame_is_scored(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of release 0.2 still works, with one warning."""
    answer: Future[float] = Future()
    monkeypatch.setattr(RecorderEpisode, name, lambda self, result: [answer], raising=False)
    for _ in range(2):
        episode = RewardPlan({"recorder": 1.0}).begin(TASK, EpisodeStart())
        assert episode.query_final_frame(make_chunk(NOTHING, terminated=True)) == [answer]
    assert capsys.readouterr().err.count("look_at_end is called query_final_frame") == (name == "look_at_end")


def test_late_rewards_find_their_steps(recorder: type[Recorder]) -> None:
    recorder.late = True
    plan = RewardPlan({"success": 1.0, "recorder": 10.0})
    chunks = [make_chunk([set()] * 2, 2), make_chunk([set()], 2, successes=[True], terminated=True)]
    sample, _ = play(plan, TASK, chunks)
    assert sample.reward_components["recorder"].tolist() == [[0, 10], [20, 0]]
    assert sample.rewards.tolist() == [[0, 10], [21, 0]], "the sum is made anew"


def test_a_source_that_forgets_steps_is_named(recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.late = True
    monkeypatch.setattr(RecorderEpisode, "finish", lambda self: {"rewards": [0.0]})
    with pytest.raises(ValueError, match="recorder.*2 steps"):
        play(RewardPlan({"recorder": 1.0}), TASK, [make_chunk([set()] * 2)])
    monkeypatch.setattr(RecorderEpisode, "finish", lambda self: {"rewards": [0.0, np.nan]})
    with pytest.raises(ValueError, match="NaN"):
        play(RewardPlan({"recorder": 1.0}), TASK, [make_chunk([set()] * 2)])


def test_schedules_reach_their_ends(recorder: type[Recorder]) -> None:
    specs = ("recorder:linear:1.0:0.1", "success:step:0:1")
    plan = RewardPlan({"success": 2.0, "recorder": 1.0}, RewardConfig(reward_schedule=specs))
    seen = []
    for index in range(5):
        plan.start_iteration(index, 5)
        seen.append(plan.weights())
    assert [w["recorder"] for w in seen] == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])
    assert [w["success"] for w in seen] == [0, 0, 2, 2, 2]
    sample, _ = play(plan, TASK, [make_chunk(NOTHING)])
    assert sample.reward_components["recorder"].tolist()[0] == pytest.approx([0.2] * 3)
    cosine = parse_schedules(["a:cosine:0:1"], ["a"])["a"]
    assert [cosine.at(x) for x in (0, 0.25, 0.5, 1)] == pytest.approx([0, (1 - 0.5**0.5) / 2, 0.5, 1])
    assert fraction_done(0, 1) == 0


def test_rm_takes_its_machine_from_the_task() -> None:
    task = make_task("Lift", ("grasped", "lifted"), control_freq=10)
    plan = RewardPlan({"rm": 0.5}, RewardConfig(rm_mode="progression"))
    assert plan.problems([task]) == []
    chunks = [make_chunk([set(), {"grasped"}, {"grasped"}]), make_chunk([set()] * 3), make_chunk([{"grasped"}] * 3)]
    sample, rewards = play(plan, task, chunks)
    assert sample.rewards.numpy() == pytest.approx(np.array([[0, 0.125, 0], [0, 0, -0.05], [0, 0, 0]]))
    assert rewards.source("rm").states == ["u0", "u0", "u1", "u1", "u1", "u1", "u0", "u1", "u1", "u1"]
    assert sample.reward_info == {"rm_progress": 0.5, "rm_reached": False, "rm_regressions": 1}


def test_rm_formula_sees_success_and_ends_failed_episodes() -> None:
    config = RewardConfig(rm_formula="G(!lifted) & F(grasped & F success)", rm_mode="progression")
    plan = RewardPlan({"rm": 1.0}, config)
    sample, rewards = play(plan, TASK, [make_chunk([{"grasped"}, set()], successes=[False, True])])
    assert sample.rewards.tolist() == [[0.25, 1.25]] and not rewards.failed
    _, rewards = play(plan, TASK, [make_chunk([{"lifted"}, set()])])
    assert rewards.failed


@pytest.mark.parametrize("ends", [False, True])
def test_potential_at_truncation(ends: bool) -> None:
    """Kept where the learner bootstraps; 0 where a truncated episode counts as over."""
    plan = RewardPlan({"rm": 1.0}, RewardConfig(rm_transition_reward=0.0, rm_terminal_reward=0.0))
    plan.sources["rm"].gamma = 1.0
    plan.sources["rm"].truncation_ends = ends
    task = make_task("Lift", ("grasped", "lifted"))
    sample, _ = play(plan, task, [make_chunk([set(), {"grasped"}], truncated=True)])
    assert sample.score == pytest.approx(0.1 * ((0 if ends else -0.5) - -1))


def test_dynamic_truncation_waits_for_patience() -> None:
    watch = ProgressWatch(patience=3, min_gain=0.02)
    stalled = []
    for progress in (0.0, 0.01, None, 0.019, 0.02, None, 0.03, 0.01, None, 0.0):
        watch.step({"rm": progress, "success": None})
        stalled.append(watch.stalled)
    assert stalled == [False] * 9 + [True], "0.02 is a gain over 0.0, 0.03 is none over 0.02"
    config = RewardConfig(dynamic_truncation=True, truncation_patience=4)
    task = make_task("Lift", ("grasped", "lifted"))
    plan = RewardPlan({"rm": 1.0}, config)
    _, rewards = play(plan, task, [make_chunk([set(), set(), {"grasped"}, {"grasped"}])] * 1)
    assert not rewards.stalled
    sample, rewards = play(plan, task, [make_chunk([set()] * 5)])
    assert rewards.stalled and sample.reward_info["stalled"] == 1
    sample, _ = play(plan, task, [make_chunk([set()] * 5, truncated=True)])
    assert sample.reward_info["stalled"] == 0, "its time was up as well"


def test_an_episode_that_has_reached_the_goal_cannot_stall() -> None:
    """It plays on to the step limit with --after_success continue."""
    watch = ProgressWatch(patience=3, min_gain=0.02)
    for progress in (0.5, 0.99, *[1.0] * 9):
        watch.step({"rm": progress})
        assert not watch.stalled
    for _ in range(3):
        watch.step({"rm": 0.5})
    assert watch.stalled, "success was lost again"


def test_late_answers_count_the_steps_that_they_are_about() -> None:
    watch = ProgressWatch(patience=10, min_gain=0.02)
    for _ in range(40):
        watch.step({})
    assert not watch.stalled, "nothing is known yet"
    watch.answered("vlm", [(0, 0.1), (5, 0.3)])
    for _ in range(40):
        watch.step({})
    assert not watch.stalled, "a judge that is slow to answer does not make the episode idle"
    watch.answered("vlm", [(10, 0.3)])
    assert not watch.stalled
    watch.answered("vlm", [(8, 0.9), (15, 0.31)])
    assert watch.stalled, "ten steps without a gain; the answer about step 8 came too late to count"
    watch.answered("vlm", [(20, 0.35)])
    assert not watch.stalled


def test_progress_that_any_source_sees_counts() -> None:
    watch = ProgressWatch(patience=3, min_gain=0.1)
    for step in range(1, 9):
        watch.step({"rm": 0.5})
        watch.answered("vlm", [(step, 0.1 * step)])
    assert not watch.stalled
    for _ in range(3):
        watch.step({"rm": 0.5})
    assert not watch.stalled, "the judge has not answered about these steps"
    watch.answered("vlm", [(11, 0.8)])
    assert watch.stalled


def test_weights_are_parsed() -> None:
    assert parse_rewards(["success:0.25"]) == {"success": 0.25}
    assert parse_rewards(["success"]) == {"success": 1.0}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"reward": ()}, ["at least one"]),
        ({"reward": ("sucess:1", "success:x")}, ["unknown source 'sucess'; known: .*success", "finite"]),
        ({"reward": ("success:inf",)}, ["finite"]),
        ({"reward": ("success:1", "success:2")}, ["twice"]),
        ({"reward_schedule": ("rm:linear:1:0", "success:slow:1:0")}, ["no component 'rm'", "write NAME"]),
        ({"reward_schedule": ("success:linear:1:nan",)}, ["finite"]),
        ({"dynamic_truncation": True}, ["--dynamic_truncation needs"]),
        ({"reward": ("rm",), "rm_formula": "F(a &"}, ["(?s)--rm_formula: the formula ends too early.*\\^"]),
        ({"reward": ("rm",), "rm_formula": "a & !a"}, ["--rm_formula: no terminal state"]),
        ({"reward": ("rm",), "rm_machine": "fold"}, ["--rm_machine fold"]),
        ({"reward": ("rm",), "rm_machine": "lift", "rm_formula": "F a"}, ["not both"]),
        ({"reward": ("reward_fn",)}, ["needs --reward_fn"]),
        ({"rm_grace": 3, "vlm_model": "m"}, ["--vlm_model m: .* no vlm", "--rm_grace 3: .* no rm"]),
        (
            {"reward_fn": "a.py:f", "remote_rm_url": "http://x"},
            ["--remote_rm_url http://x: .* no remote", "--reward_fn a.py:f: .* no reward_fn"],
        ),
        ({"reward": ("remote",)}, ["needs --remote_rm_url"]),
    ],
)
def test_all_mistakes_at_once(config: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        RewardPlan.from_config(RewardConfig.from_flags(**config))
    assert len(error.value.problems) == len(words)
    for problem, word in zip(error.value.problems, words):
        assert re.search(word, str(problem))


@pytest.mark.parametrize("order", ["any", "listed"])
def test_libero_goals_become_machines(order: str) -> None:
    """Its environments register the predicates of their BDDL goal as propositions."""
    goal = ("on_moka_pot_1_stove_1", "turnon_stove_1")
    task = replace(make_task("KITCHEN_SCENE3", goal), suite="libero_10", machine="goals")
    plan = RewardPlan.from_config(RewardConfig(reward=("rm",), rm_goal_order=order, rm_mode="progression"))
    assert plan.problems([task]) == []
    walk = [{goal[1]}, {goal[0]}, {*goal}]
    assert play(plan, task, [make_chunk(walk)])[0].rewards.tolist()[0] == pytest.approx(
        [0.25, 0, 1.25] if order == "any" else [0, 0.25, 1.25]
    )


def test_propositions_are_checked_against_the_tasks() -> None:
    plan = RewardPlan.from_config(RewardConfig(reward=("rm",), rm_formula="F(grasped & F flown)"))
    (problem,) = plan.problems([TASK, TASK])
    assert "unknown proposition flown" in problem and "grasped, lifted, success" in problem
    plan = RewardPlan.from_config(RewardConfig(reward=("rm",), rm_machine="cleanup"))
    assert "unknown proposition" in plan.problems([TASK])[0]
    plan = RewardPlan.from_config(RewardConfig(reward=("rm",)))
    assert "no reward machine belongs to robosuite task Fly" in plan.problems([make_task("Fly")])[0]


@pytest.mark.parametrize(
    ("machine", "states", "problem"),
    [
        ("stack", 5, None),
        ("chain", 4, None),
        ("goals", 8, None),
        ("F(cubeA_grasped & F stacked)", 3, None),
        (None, 0, "no reward machine belongs to"),
        ("stak", 0, "unknown proposition stak"),
        ("nut", 0, "unknown proposition"),
    ],
)
def test_a_task_names_its_machine(machine: str | None, states: int, problem: str | None) -> None:
    names = ("cubeA_grasped", "cubes_aligned", "stacked")
    names += ("cubeA_lifted",) if machine == "stack" else ()
    source = MachineSource(RewardConfig(reward=("rm",)))
    task = replace(make_task("Stack", names), machine=machine)
    found = source.problems([task])
    if problem is None:
        assert found == [] and len(source.graph(task).states) == states
    else:
        assert problem in found[0]


def test_the_machines_of_all_tasks_that_ship_are_fed_by_their_environments() -> None:
    source = MachineSource(RewardConfig(reward=("rm",)))
    tasks = [task for suite in ("toy_reach", "toy_push", "robosuite") for task in list_tasks(suite)]
    assert source.problems(tasks) == [] and len(tasks) == 11


def test_what_the_simulator_pays_is_paid_step_by_step() -> None:
    plan = RewardPlan.from_config(RewardConfig(reward=("success", "env:0.5")))
    chunks = [make_chunk(NOTHING), make_chunk([set()], 3, successes=[True], terminated=True)]
    chunks[0].rewards[:] = (0.25, -1.0, 2.0)
    chunks[1].rewards[:] = (4.0, 0.0, 0.0)
    sample, _ = play(plan, TASK, chunks)
    assert sample.reward_components["env"].tolist() == [[0.125, -0.5, 1.0], [2.0, 0, 0]]
    assert sample.rewards.tolist() == [[0.125, -0.5, 1.0], [3.0, 0, 0]] and sample.score == 3.625


def test_changes_of_what_the_simulator_pays_are_shares_of_its_range() -> None:
    plan = RewardPlan.from_config(RewardConfig(reward=("success", "env_progress:0.5")))
    task = replace(TASK, reward_range=(-2.0, 6.0))
    chunks = [make_chunk(NOTHING), make_chunk([set()], 3, successes=[True], terminated=True)]
    chunks[0].rewards[:] = (2.0, 4.0, 0.0)
    chunks[1].rewards[:] = (6.0, 0.0, 0.0)
    assert plan.problems([task]) == []
    sample, _ = play(plan, task, chunks)
    assert sample.reward_components["env_progress"].tolist() == [[0.0, 0.125, -0.25], [0.375, 0, 0]]
    assert sample.score == 1.25, "success, and half of the way from 2 to 6 of a range of 8"
    again, _ = play(plan, task, chunks)
    assert again.score == 1.25, "nothing is kept from one episode to the next"
    for unknown in (None, (1.0, 1.0)):
        (problem,) = plan.problems([replace(TASK, reward_range=unknown)])
        assert (problem.flag, problem.reason) == ("reward", "unavailable") and "reward_range" in problem.text


def test_affordances_are_paid_where_the_task_has_them() -> None:
    plan = RewardPlan.from_config(RewardConfig(reward=("success", "affordance:15")))
    task = replace(TASK, reward_components=("affordance",))
    chunks = [make_chunk([set()], 3), make_chunk(NOTHING, successes=[False, False, True], terminated=True)]
    chunks[0].components["affordance"] = np.array([-0.5, 0.0, 0.0], np.float32)
    chunks[1].components["affordance"] = np.array([-0.25, 0.0, 0.0], np.float32)
    chunks[1].rewards[2] = 1.0
    assert plan.problems([task]) == []
    sample, _ = play(plan, task, chunks)
    assert sample.reward_components["affordance"].tolist() == [[-7.5, 0, 0], [-3.75, 0, 0]]
    assert sample.score == 1.0 - 11.25
    (problem,) = plan.problems([TASK, task])
    assert (problem.flag, problem.reason) == ("reward", "unavailable") and "primitives" in problem.text

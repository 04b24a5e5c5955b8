"""Evaluation: episodes, figures and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli.eval_vla import main
from rlvla.envs import list_tasks
from rlvla.envs.config import SplitConfig
from rlvla.evaluation.comparison import compare
from rlvla.evaluation.evaluate import evaluate
from rlvla.evaluation.protocol import Instructions
from rlvla.evaluation.results import EpisodeOutcome, EvalResult, Rate, sample_of, summarize
from rlvla.evaluation.statistics import clustered_interval, wilson_interval
from rlvla.rollout import EpisodeRequest
from rlvla.rollout.stats import RolloutStats

TOY = list_tasks("toy_reach")[0]
TASKS = [TOY, replace(TOY, task_id=1, name="other")]
POLICY = SimpleNamespace(spec=SimpleNamespace(proprio_limit=1.0))  # the engines below do not ask it


class Engine:
    """Records the requests; an episode succeeds at end on even states and once on all multiples of 3 too."""

    success_source = "simulator"

    def __init__(self) -> None:
        self.requests: list[EpisodeRequest] = []
        self.options: dict = {}
        self.kind: type = Played
        self.stats = RolloutStats()

    def run(self, requests, policy, *, on_episode, **options):
        self.requests, self.options = list(requests), options
        samples = [self.kind(request) for request in requests]
        for sample in reversed(samples):  # any order
            on_episode(sample)
        return samples


class Played:
    simulator_once = simulator_at_end = None
    unanswered, failure = 0, ""

    def __init__(self, request: EpisodeRequest):
        self.task_id, self.uid = request.task_id, request.uid
        self.success_at_end = request.init_state_id % 2 == 0
        self.success_once = self.success_at_end or request.init_state_id % 3 == 0
        self.init_state_id = request.init_state_id
        self.finish_step = 10 + request.task_id
        self.regressions = int(self.success_once and not self.success_at_end)
        self.proprio, self.state_width = None, 0


class Rank:
    """A strategy of which only the rank counts; `others` are the outcomes that other ranks send."""

    def __init__(self, rank: int = 0, world_size: int = 1, others: tuple = ()):
        self.rank, self.world_size, self.is_main, self._others = rank, world_size, False, list(others)

    def gather_objects(self, item):
        self.sent = item
        return [item, *self._others] if self.world_size > 1 else [item]

    def any(self, condition):
        return condition


def run(strategy: Rank, split: SplitConfig | None = None, n: int = 10, seed: int = 0, **kw):
    engine = Engine()
    split = split or SplitConfig()
    result = evaluate(engine, POLICY, TASKS, strategy, episodes_per_task=n, split=split, seed=seed, **kw)
    return engine, result


@pytest.mark.parametrize(("edge", "said"), [(1.0, True), (0.5, False)])
def test_proprio_outside_the_statistics_is_warned_about(edge: float, said: bool, capsys: pytest.CaptureFixture) -> None:
    class Foreign(Played):
        def __init__(self, request: EpisodeRequest):
            super().__init__(request)
            self.proprio = torch.tensor([[edge, -edge, 1.0], [edge, edge, 0.0]])
            self.proprio[:, 1] *= 1 + request.init_state_id % 2
            self.state_width = 1

    strategy = Rank()
    strategy.is_main = True
    engine = Engine()
    engine.kind = Foreign
    evaluate(engine, POLICY, TASKS, strategy, episodes_per_task=4, split=SplitConfig(), seed=0)
    assert ("dataset statistics" in capsys.readouterr().err) == said


def test_held_out_states_of_every_task_each_once() -> None:
    engine, result = run(Rank())
    assert [(r.task_id, r.init_state_id) for r in engine.requests] == [(t, 8000 + i) for t in (0, 1) for i in range(10)]
    assert engine.options["greedy"] is True
    assert result.protocol == "heldout" and result.success_at_end.n == 20
    shared, result = run(Rank(), SplitConfig(eval_protocol="shared"))
    assert shared.requests[0].init_state_id == 0 and result.protocol == "shared"
    own, result = run(Rank(), SplitConfig(eval_init_states=(50, 60)))
    assert own.requests[0].init_state_id == 50 and result.protocol == "states 50..59, trained on heldout"


def test_without_a_strategy_this_process_plays_all_held_out_states() -> None:
    engine = Engine()
    result = evaluate(engine, POLICY, TASKS, episodes_per_task=10)
    same, reference = run(Rank())
    assert engine.requests == same.requests and result == reference


def test_tables_of_many_tasks_list_categories() -> None:
    kinds = ["view" if number % 3 == 0 else "light" for number in range(102)]
    tasks = [replace(TOY, task_id=i, name=f"t{i}", category=kind) for i, kind in enumerate(kinds)]
    outcomes = [EpisodeOutcome(task.task_id, 0, task.task_id % 2 == 0, True, 5) for task in tasks]
    result = summarize(outcomes, tasks, "heldout", True)
    assert [row[0] for row in result.rows()] == ["view (34)", "light (68)", "all"]
    assert result.rows()[0][2].startswith("50.0% [") and len(result.as_dict()["tasks"]) == 102
    other = summarize([replace(o, success_at_end=True) for o in outcomes], tasks, "heldout", True)
    found = compare("a", result, "b", other).differences
    assert [d.task for d in found if d.measure == "success_at_end"] == ["view", "light", "all"]
    assert [d.n for d in found if d.measure == "success_at_end"] == [34, 68, 102]
    few = summarize(outcomes[:100], tasks[:100], "heldout", True)
    assert len(few.rows()) == 101


def test_shuffled_instructions_are_those_of_other_tasks_or_states() -> None:
    """Other instructions are equally frequent over initial states, for any seed; tasks may have one or several."""
    push = [task for task in list_tasks("toy_push") if task.task_id != 3]
    heard = Instructions("shuffled", push)
    first = [heard.of(push[0], state) for state in range(300)]
    others = {task.instruction for task in push[1:]}
    assert {frozenset(texts) for texts in first} == {frozenset(others)}, "never its own, even if told in other words"
    assert 110 < [texts[0] for texts in first].count(push[1].instruction) < 190
    assert set(Instructions("shuffled", [TOY]).of(TOY, 0)) < set(TOY.instructions), "the episode chooses another"
    assert Instructions("own", [TOY]).of(TOY, 0) == ()
    engines = [run(Rank(), seed=seed, instructions="shuffled")[0] for seed in (0, 1)]
    assert [r.other_instructions for r in engines[0].requests] == [r.other_instructions for r in engines[1].requests]
    assert {r.other_instructions for r in run(Rank(), instructions="none")[0].requests} == {("",)}
    assert not any(r.blind for r in engines[0].requests)
    assert all(r.blind for r in run(Rank(), images="none")[0].requests)


def test_two_policies_meet_the_same_episodes() -> None:
    assert run(Rank())[0].requests == run(Rank())[0].requests
    assert {r.seed for r in run(Rank())[0].requests} != {r.seed for r in run(Rank(), seed=1)[0].requests}


def test_success_once_and_at_end_are_two_numbers_with_intervals() -> None:
    _, result = run(Rank())
    assert (result.success_at_end.rate, result.success_once.rate) == (0.5, 0.7)
    assert (result.success_once.low, result.success_once.high) == wilson_interval(14, 20)
    assert [t.success_at_end.n for t in result.tasks] == [10, 10]
    assert [t.mean_length for t in result.tasks] == [10.0, 11.0] and result.mean_length == 10.5
    text = result.as_table()
    assert (
        "other" in text
        and "all" in text
        and "(greedy, protocol heldout; success detector: the simulator)" in text
        and "70.0% [" in text
    )
    assert EvalResult.from_dict(json.loads(json.dumps(result.as_dict()))) == result
    assert [t.regressions for t in result.tasks] == [0.2, 0.2]  # success once but not at end: 8001 and 8007
    assert result.episodes[1] == EpisodeOutcome(0, 8001, False, True, 10, 1)
    metrics = result.as_metrics()
    assert metrics["eval/regressions"] == 0.2 and metrics["eval_tasks/other"] == 0.5
    assert metrics["eval/success_at_end"] == 0.5 and metrics["eval/n"] == 20


def test_ranks_share_the_episodes_and_count_all() -> None:
    whole, one = run(Rank())
    strategies = [Rank(0, 2), Rank(1, 2)]
    halves = [run(s)[0] for s in strategies]
    requests = [e.requests for e in halves]
    assert sorted(requests[0] + requests[1], key=whole.requests.index) == whole.requests
    _, joined = run(Rank(0, 2, others=(strategies[1].sent,)))
    assert joined == one


def test_sampled_evaluation_goes_by_another_name() -> None:
    engine, result = run(Rank(), greedy=False, temperature=1.6)
    assert engine.options == {"greedy": False, "temperature": 1.6, "success_only": True, "kept": 0}
    assert "eval_sampled/success_at_end" in result.as_metrics()
    assert "sampled" in result.as_table()


class ByChance(Engine):
    """Every initial state below 8005 succeeds with its odd samples, the others never."""

    def run(self, requests, policy, *, on_episode, **options):
        samples = super().run(requests, policy, on_episode=on_episode, **options)
        for sample in samples:
            sample.success_at_end = sample.init_state_id < 8005 and sample_of(sample.uid) % 2 == 1
        return samples


def test_several_samples_per_state_are_clustered() -> None:
    options = {"episodes_per_task": 10, "split": SplitConfig(), "seed": 0, "greedy": False, "samples": 4}
    engine = ByChance()
    result = evaluate(engine, POLICY, TASKS, Rank(), **options)
    assert len(engine.requests) == 80 and len({(r.uid, r.seed) for r in engine.requests}) == 80
    assert [r for r in engine.requests if not sample_of(r.uid)] == run(Rank())[0].requests, "the first are those of one"
    assert (result.success_at_end.rate, result.success_at_end.n) == (0.25, 80)
    counts = [(2, 4)] * 5 + [(0, 4)] * 5
    assert (result.success_at_end.low, result.success_at_end.high) == clustered_interval(2 * counts)
    assert result.tasks[0].success_at_end.low == clustered_interval(counts)[0]
    assert result.pass_at_k == Rate.of(([True] * 5 + [False] * 5) * 2)
    metrics = result.as_metrics("eval")
    assert metrics["eval/pass_at_4"] == 0.5 and metrics["eval/success_at_end_low"] == result.success_at_end.low
    assert EvalResult.from_dict(json.loads(json.dumps(result.as_dict()))) == result
    halves = [Rank(0, 2), Rank(1, 2)]
    for rank in halves:
        evaluate(ByChance(), POLICY, TASKS, rank, **options)
    assert evaluate(ByChance(), POLICY, TASKS, Rank(0, 2, others=(halves[1].sent,)), **options) == result


def test_pass_at_k_is_of_states_with_all_their_samples() -> None:
    outcomes = [EpisodeOutcome(0, state, False, False, 3, sample=k) for state in (7, 8) for k in range(2)]
    assert summarize(outcomes[:-1], [TOY], "heldout", False, samples=2).pass_at_k == Rate.of([False])
    assert summarize(outcomes[:1], [TOY], "heldout", False, samples=2).pass_at_k is None
    assert "samples" not in summarize(outcomes[:1], [TOY], "heldout", True).as_dict()


def test_rate_of_outcomes() -> None:
    rate = Rate.of([True, False, False, True])
    assert (rate.rate, rate.n) == (0.5, 4)
    assert str(rate).startswith("50.0% [")
    assert summarize([EpisodeOutcome(0, 7, True, True, 3)], [TOY], "heldout", True).success_at_end.rate == 1.0


def test_the_command_writes_figures(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "deep" / "figures.json"
    argv = ["--pretrain", str(policy_folder), "--eval_episodes", "4", "--num_envs", "2", "--sampled"]
    main([*argv, "--temperature", "1.6", "--output", str(output)])
    content = json.loads(output.read_text())
    greedy, sampled = content["results"]
    assert greedy["greedy"] and not sampled["greedy"]
    assert content["policy"] == str(policy_folder) and content["temperature"] == 1.6
    assert content["environment"]["task_suite_name"] == "toy_reach"
    for result in (greedy, sampled):
        assert result["success_at_end"]["n"] == 4 and result["protocol"] == "heldout"
        assert set(result["success_at_end"]) == {"rate", "n", "low", "high"}
    out = capsys.readouterr().out
    assert "greedy" in out and "sampled" in out and str(output) in out
    main([*argv, "--temperature", "1.6", "--num_envs", "1", "--output", str(tmp_path / "again.json")])
    assert json.loads((tmp_path / "again.json").read_text())["results"] == content["results"]


def test_the_command_plays_states_several_times(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    argv = ["--pretrain", str(policy_folder), "--eval_episodes", "3", "--num_envs", "1", "--sampled", "--eval_samples"]
    main([*argv, "2", "--output", str(tmp_path / "several.json")])
    content = json.loads((tmp_path / "several.json").read_text())
    greedy, sampled = content["results"]
    assert greedy["success_at_end"]["n"] == 3 and "samples" not in greedy
    assert sampled["success_at_end"]["n"] == 6 and sampled["samples"] == 2 and sampled["pass_at_k"]["n"] == 3
    assert "2 episodes per initial state, pass@2 " in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--sampled", "--compare", "base"]])
def test_samples_that_do_not_fit(policy_folder: Path, capsys: pytest.CaptureFixture, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--pretrain", str(policy_folder), "--eval_samples", "2", *flags])
    assert stop.value.code == 2 and "--eval_samples 2: " in capsys.readouterr().err


def test_the_page_does_not_replace_the_results(policy_folder: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--pretrain", str(policy_folder), "--output", "eval.md"])
    assert "name a .json file" in capsys.readouterr().err


def test_dropped_episodes_are_counted_and_reported() -> None:
    class Losing(Engine):
        def run(self, requests, policy, *, on_episode, **options):
            return super().run(requests[:-3], policy, on_episode=on_episode, **options)

    result = evaluate(Losing(), POLICY, TASKS, Rank(), episodes_per_task=10, split=SplitConfig(), seed=0)
    assert result.dropped == 3 and result.success_at_end.n == 17 and result.as_metrics()["eval/dropped"] == 3
    assert "3 EPISODES COULD NOT BE PLAYED" in result.as_table()
    with pytest.raises(RuntimeError, match="no evaluation episode of other"):
        evaluate(Losing(), POLICY, TASKS, Rank(), episodes_per_task=3, split=SplitConfig(), seed=0)


def test_episodes_in_the_journal_are_not_played_again() -> None:
    class Notes:
        def __init__(self, done):
            self.done, self.new = list(done), []

        def read(self):
            return self.done

        def append(self, outcome):
            self.new.append(outcome)

    _, whole = run(Rank())
    elsewhere = EpisodeOutcome(0, 9999, True, True, 1)  # of an evaluation of more episodes
    notes = Notes([*whole.episodes[:7], elsewhere])
    engine, result = run(Rank(), journal=notes)
    assert result == whole
    assert len(engine.requests) == len(notes.new) == 13 and engine.options["kept"] == 7
    assert {(r.task_id, r.init_state_id) for r in engine.requests} == {
        (e.task_id, e.init_state_id) for e in whole.episodes[7:]
    }

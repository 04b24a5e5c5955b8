"""Final report of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlvla.envs import list_tasks
from rlvla.envs.config import SplitConfig
from rlvla.evaluation.protocol import describe_protocol
from rlvla.evaluation.report import PolicyEvaluation
from rlvla.evaluation.results import EpisodeOutcome, summarize
from rlvla.evaluation.statistics import tango_interval
from rlvla.recipes.progress import measurements, progress_chart
from rlvla.recipes.recipe import Stage
from rlvla.recipes.report import build_report, conclude, describe, outcome_of
from rlvla.recipes.state import DONE, State

TASK = list_tasks("toy_reach")[0]
TRIALS = [{"success_at_end": rate, "low": rate - 0.1, "high": rate + 0.1} for rate in (0.5, 0.7)]
SECONDS = {"sft": 2.0, "eval_sft": 1.0, "rl": 7.0, "eval_rl": 1.5}


def stages_of(folder: Path, *names: str) -> list[Stage]:
    outputs = {"sft": "sft", "eval_sft": "eval_sft.json", "rl": "ppo", "eval_rl": "eval_rl.json"}
    return [Stage(name, {}, ("--seed=0",), folder / outputs.get(name, name)) for name in names]


def finished(folder: Path, sft: list[bool], rl: list[bool]) -> tuple[list[Stage], State]:
    """A folder in which all stages have run."""
    (folder / "ppo").mkdir(parents=True)
    for name, successes in (("sft", sft), ("rl", rl)):
        outcomes = [EpisodeOutcome(0, state, success, success, 5) for state, success in enumerate(successes)]
        protocols = {
            mode: describe_protocol([TASK], SplitConfig(), len(sft), 0, temperature)
            for mode, temperature in (("greedy", None), ("sampled", 1.0))
        }
        results = [summarize(outcomes, [TASK], "heldout", greedy) for greedy in (True, False)]
        evaluation = PolicyEvaluation(str(folder / name / "policy"), {}, protocols, results)
        (folder / f"eval_{name}.json").write_text(json.dumps(evaluation.as_dict()))
    (folder / "ppo" / "totals.json").write_text('{"env_steps": 640, "episodes": 128}')
    stages, state = stages_of(folder, *SECONDS), State(folder)
    for stage in stages:
        state.note(stage, DONE, SECONDS[stage.name])
    return stages, state


def report_of(stages: list[Stage], state: State) -> dict:
    return build_report(outcome_of(stages, state))


def test_the_gain_is_that_of_pairs(tmp_path: Path) -> None:
    # 30 of 50 against 21 of 50: the intervals of the rates overlap, but nothing was lost and nine states were gained.
    report = report_of(*finished(tmp_path / "run", [True] * 21 + [False] * 29, [True] * 30 + [False] * 20))
    low, high = tango_interval(9, 0, 50)
    assert report["rl"]["low"] < report["sft"]["high"] and low > 0
    gain = report["difference"]
    assert (gain["gained"], gain["lost"], gain["n"]) == (9, 0, 50)
    assert (gain["difference"], gain["low"], gain["high"]) == pytest.approx((0.18, low, high))
    assert report["seconds"] == {"sft": 2.0, "eval": 2.5, "rl": 7.0, "total": 11.5}
    text = describe(report)
    assert f"greedy: +18.0 [{100 * low:+.1f}, {100 * high:+.1f}] percentage points, p = 0.0039" in text
    assert "NO IMPROVEMENT" not in text


def test_the_report_has_the_keys_that_programs_read(tmp_path: Path) -> None:
    stages, state = finished(tmp_path, [False] * 10, [True] * 10)
    text = conclude(stages, state)
    report = json.loads((tmp_path / "report.json").read_text())
    modes = {"sft", "sft_sampled", "rl", "rl_sampled"}
    assert set(report) == modes | {"difference", "seconds", "env_steps", "episodes", "seed", "protocol"}
    assert set(report["rl"]) == {"success_at_end", "success_once", "n", "low", "high"}
    assert (report["env_steps"], report["episodes"], report["seed"]) == (640, 128, 0)
    page = (tmp_path / "report.html").read_text()
    assert "+100.0" in page and ">eval_sft</td>" in page and "--seed=0" in page
    page = tmp_path / "report.html"
    assert text.endswith(f"\nreport: {page}\nopen: {page.as_uri()}"), "the last line names what to look at"


def test_choices_of_stages_are_shown(tmp_path: Path) -> None:
    stages, state = finished(tmp_path, [True, False], [True, True])
    tune, dagger = stages_of(tmp_path, "tune", "dagger")
    for stage, file, summary in ((tune, "trials.json", "two of five"), (dagger, "rounds.json", "40% -> 97%")):
        stage.output.mkdir(parents=True)
        (stage.output / file).write_text(json.dumps({"rounds": [], "summary": summary}))
        state.note(stage, DONE, 1.0)
    (tune.output / "trials.json").write_text(json.dumps({"rounds": [{"trials": TRIALS}], "summary": "two of five"}))
    text = conclude([tune, dagger, *stages], state)
    assert "tune: two of five\ndagger: 40% -> 97%" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["choices"] == {"tune": "two of five", "dagger": "40% -> 97%"}
    assert "40% -&gt; 97%" in (tmp_path / "report.html").read_text()


def test_success_over_the_minutes_of_all_stages(tmp_path: Path) -> None:
    stages, state = finished(tmp_path, [True, False], [True, True])
    tune, dagger = stages_of(tmp_path, "tune", "dagger")
    rounds = [{"rate": 0.4, "low": 0.3, "high": 0.5, "seconds": s} for s in (30.0, 90.0)]
    records = [{"step": n, "eval/success_at_end": 0.5, "eval/n": 10, "timing_s/iteration": 2.0} for n in (1, 2)]
    for stage, file, content in (
        (tune, "trials.json", json.dumps({"rounds": [{"trials": TRIALS}]})),
        (dagger, "rounds.json", json.dumps({"rounds": rounds})),
        (stages[2], "metrics.jsonl", "\n".join(json.dumps(record) for record in records)),
    ):
        stage.output.mkdir(parents=True, exist_ok=True)
        (stage.output / file).write_text(content)
    state.note(tune, DONE, 60.0)
    state.note(dagger, DONE, 130.0)
    rates = {"eval_sft": {"success_at_end": 0.5, "low": 0.1, "high": 0.9}}
    series = measurements([tune, dagger, *stages], state, rates)
    times = {name: [60 * one.minutes for one in points] for name, points in series.items()}
    # Before the evaluation come 190 s and 2 s of `sft`; the evaluations of `rl` are those of its last two iterations.
    assert times == {"tune": [60], "dagger": [90, 180], "eval_sft": [193], "rl": [pytest.approx(198), 200]}
    assert (series["tune"][0].rate, series["tune"][0].high) == pytest.approx((0.7, 0.8))
    conclude([tune, dagger, *stages], state)
    assert "by stage</figcaption>" in (tmp_path / "report.html").read_text()
    assert progress_chart(stages[:2], state, rates) is None, "one measurement is no progress"


def test_no_improvement_is_reported_as_such(tmp_path: Path) -> None:
    same = [True, False] * 20
    worse = [False] * 40
    for name, rl in (("same", same), ("worse", worse)):
        assert "; NO IMPROVEMENT IS SHOWN" in describe(report_of(*finished(tmp_path / name, same, rl)))


def test_the_evaluations_of_the_training_serve_if_there_is_no_stage_for_them(tmp_path: Path) -> None:
    outcomes = {0: [False] * 8 + [True] * 2, 4: [True] * 5 + [False] * 5, 8: [True] * 10}
    entries = []
    for iteration, successes in outcomes.items():
        episodes = [EpisodeOutcome(0, state, success, success, 5) for state, success in enumerate(successes)]
        entries.append({"iteration": iteration, **summarize(episodes, [TASK], "heldout", True).as_dict()})
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo/evaluations.json").write_text(json.dumps(entries))
    flags = {"env": {"task_suite_name": "toy_reach"}, "run": {"seed": 3}, "policy": {"pretrain": "sft/policy"}}
    (tmp_path / "ppo/run_config.json").write_text(json.dumps(flags))
    stages, state = stages_of(tmp_path, "sft", "rl"), State(tmp_path)
    report = report_of(stages, state)
    assert (report["sft"]["success_at_end"], report["rl"]["success_at_end"]) == (0.2, 1.0)
    assert (report["difference"]["gained"], report["difference"]["lost"], report["seed"]) == (8, 0, 3)
    conclude(stages, state)
    assert "+80.0" in (tmp_path / "report.html").read_text()


def test_a_recipe_without_evaluations_reports_its_times(tmp_path: Path) -> None:
    stages, state = stages_of(tmp_path, "sft"), State(tmp_path)
    state.note(stages[0], DONE, 61.0)
    assert "sft 1m01s, total 1m01s" in conclude(stages, state)
    assert not (tmp_path / "report.html").exists()

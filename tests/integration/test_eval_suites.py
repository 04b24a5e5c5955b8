"""Several suites in one evaluation: each as if it were alone, the mean over them, resuming, comparisons, mistakes."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from cli.eval_vla import main
from rlvla.commands import evaluate as eval_run
from rlvla.envs import list_tasks
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.evaluation.protocol import describe_protocol
from rlvla.evaluation.report import EvaluationReport, PolicyEvaluation, SuiteEvaluation
from rlvla.evaluation.results import EpisodeOutcome, EvalResult, Rate, summarize
from rlvla.evaluation.statistics import mcnemar_exact, tango_interval, wilson_interval
from rlvla.rollout import RolloutEngine
from rlvla.utils.video import read_video
from tests.support.robosuite_primitives import soft_actor_of_primitives
from tests.support.robosuite_reference import require_simulator

MODULE = str(Path(__file__).resolve().parents[1] / "support" / "mirrored_reach.py")
ARGS = ["--num_envs", "1", "--eval_episodes", "4", "--custom_module", MODULE]
BOTH = ["--task_suite_name", "toy_reach", "mirrored_reach"]


def refused(capsys: pytest.CaptureFixture, *argv: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in argv])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_each_suite_is_as_if_it_were_alone(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    other = Path(shutil.copytree(policy_folder, tmp_path / "other"))
    output = tmp_path / "figures" / "all.json"
    argv = ["--pretrain", policy_folder, "--compare", other, *ARGS]
    main([str(w) for w in [*argv, *BOTH, "--output", output, "--num_videos", 1, "--report", output.parent]])
    printed = capsys.readouterr().out
    content = json.loads(output.read_text())
    assert list(content["suites"]) == ["toy_reach", "mirrored_reach"]
    for suite, found in content["suites"].items():
        alone = tmp_path / f"{suite}.json"
        main([str(w) for w in [*argv, "--task_suite_name", suite, "--output", alone]])
        expected = json.loads(alone.read_text())
        for name in ("results", "protocols", "environment", "comparisons"):
            assert found[name] == expected[name], (suite, name)
    # The recorded suite's tasks and limits are its own: the other one is played whole.
    assert [t["name"] for t in content["suites"]["mirrored_reach"]["results"][0]["tasks"]] == [
        "mirrored",
        "mirrored_short",
    ]
    videos = [path.relative_to(output.parent / "all_videos").parts for path in output.parent.rglob("*.mp4")]
    assert {parts[0] for parts in videos} == {"toy_reach", "mirrored_reach"} and {len(parts) for parts in videos} == {4}
    trained_on = {suite: found["trained_on"] for suite, found in content["suites"].items()}
    assert trained_on["toy_reach"].endswith("of reach") and "trained in toy_reach; no" in trained_on["mirrored_reach"]
    (comparison,) = content["comparisons"]
    at_end = [d for d in comparison["differences"] if d["measure"] == "success_at_end"]
    assert [(d["task"], d["n"], d["p_value"]) for d in at_end] == [
        ("toy_reach", 4, 1.0),
        ("mirrored_reach", 8, 1.0),
        ("mean of suites", 12, 1.0),
    ]
    text, page = output.with_suffix(".md").read_text(), (output.parent / "report.html").read_text()
    assert f"## {policy_folder}, greedy, all suites" in text and f"## mirrored_reach: {other}, greedy" in text
    assert "| mean of suites | 12 |" in text and "mean of suites" in printed
    assert "Success at end by suite" in page and "mirrored_reach: Success at end by task" in page
    assert page.count("data:video/mp4") == len(videos) == 4
    # The file stands for its policy, suite by suite.
    main(
        [str(w) for w in ["--pretrain", other, "--compare", output, *ARGS, *BOTH, "--output", tmp_path / "again.json"]]
    )
    assert len(json.loads((tmp_path / "again.json").read_text())["comparisons"]) == 1


def test_it_continues_in_the_suite_where_it_was_killed(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--pretrain", str(policy_folder), *ARGS, *BOTH]
    main([*argv, "--output", str(tmp_path / "whole.json")])
    run, played = RolloutEngine.run, []

    def dying(self, requests, policy, *, on_episode, **options):
        def seen(sample):
            on_episode(sample)
            played.append((sample.suite, sample.task_id, sample.init_state_id))
            if len(played) == 6:
                raise KeyboardInterrupt

        return run(self, requests, policy, on_episode=seen, **options)

    output = tmp_path / "parts.json"
    monkeypatch.setattr(RolloutEngine, "run", dying)
    with pytest.raises(SystemExit, match="130"):
        main([*argv, "--output", str(output)])
    assert [suite for suite, _, _ in played] == ["toy_reach"] * 4 + ["mirrored_reach"] * 2
    assert not output.exists()
    main([*argv, "--output", str(output)])
    assert len(played) == len(set(played)) == 12, "no episode is played twice"
    whole = json.loads((tmp_path / "whole.json").read_text())
    found = json.loads(output.read_text())
    assert found["mean_of_suites"] == whole["mean_of_suites"]
    assert [s["results"] for s in found["suites"].values()] == [s["results"] for s in whole["suites"].values()]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts.json", "parts.md", "whole.json", "whole.md"]


def test_mistakes_are_told_before_anything_starts(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_run, "start_workers", None)
    argv = ["--pretrain", policy_folder, *ARGS, "--task_suite_name"]
    told = refused(capsys, *argv, "toy_reach", "toyreach")
    assert (
        "unknown task suite 'toyreach' (did you mean toy_reach?); known suites: " in told and "libero_10[_lan|" in told
    )
    assert "--task_suite_name: toy_reach is given twice" in refused(capsys, *argv, "toy_reach", "toy_reach")
    err = refused(capsys, *argv, "toy_reach", "mirrored_reach", "--task_ids", 1)
    assert "toy_reach has no task 1" in err and err.count("  - ") == 1, "the other suite has it"
    err = refused(capsys, *argv, "toy_reach", "mirrored_reach", "--unnorm_key", "other")
    assert "no action statistics for 'other'" in err and err.count("  - ") == 1, "what all suites share is told once"
    err = refused(capsys, *argv, "toy_reach", "mirrored_reach", "--max_steps", 0, "--control_freq", 3)
    assert "--max_steps 0" in err and "toy_reach has no option control_freq" in err


def test_an_earlier_file_must_hold_the_suites(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    earlier = tmp_path / "earlier.json"
    main([str(w) for w in ["--pretrain", policy_folder, *ARGS, "--output", earlier]])
    argv = ["--pretrain", policy_folder, "--compare", earlier, *ARGS]
    err = refused(capsys, *argv, *BOTH)
    assert "suite mirrored_reach and toy_reach" in err and err.count("  - ") == 1
    err = refused(capsys, *argv, *BOTH, "--allow_unpaired")
    assert f"--compare {earlier} is an evaluation of toy_reach alone" in err and err.count("  - ") == 1
    both = {"suites": {"mirrored_reach": json.loads(earlier.read_text())}}
    earlier.write_text(json.dumps(both))
    assert f"{earlier} holds mirrored_reach, not toy_reach" in refused(capsys, *argv)


def test_another_suite_takes_over_what_is_seen_only() -> None:
    recorded = {"task_suite_name": "robosuite", "task_ids": [0], "max_steps": 30, "control_freq": 5.0}
    recorded |= {"cameras": ["top"], "image_size": 48, "use_proprio": True}
    same, other = EnvConfig().completed(recorded), EnvConfig("mirrored_reach").completed(recorded)
    assert (same.task_ids, same.max_steps, same.options) == ((0,), 30, {"control_freq": 5.0})
    assert (other.task_ids, other.max_steps, other.options) == ((), None, {})
    assert other.cameras == same.cameras == ("top",) and other.image_size == 48 and other.use_proprio


def _evaluation(policy: str, suite: str, successes: list[bool], dropped: int = 0) -> PolicyEvaluation:
    (task,) = list_tasks("toy_reach")
    protocol = describe_protocol([task], SplitConfig(), len(successes), 0, None) | {"suite": suite}
    outcomes = [EpisodeOutcome(0, 8000 + i, s, True, 5) for i, s in enumerate(successes)]
    result = summarize(outcomes, [task], "heldout", True, requested=len(outcomes) + dropped)
    return PolicyEvaluation(policy, {}, {"greedy": protocol}, [result])


def test_suites_have_the_same_weight() -> None:
    yes, no = True, False
    findings = EvaluationReport.of(
        {
            "small": SuiteEvaluation.of(
                _evaluation("p", "small", [yes] * 4), [_evaluation("b", "small", [no] * 4, dropped=2)]
            ),
            "large": SuiteEvaluation.of(
                _evaluation("p", "large", [yes] * 10 + [no] * 30), [_evaluation("b", "large", [yes] * 20 + [no] * 20)]
            ),
        }
    )
    own = findings.results[0].success_at_end
    assert (own.rate, own.n) == ((1.0 + 0.25) / 2, 44)
    (low_1, high_1), (low_2, high_2) = wilson_interval(4, 4), wilson_interval(10, 40)
    assert own.low == pytest.approx(0.625 - math.sqrt((1 - low_1) ** 2 + (0.25 - low_2) ** 2) / 2)
    assert [("2 EPISODES COULD NOT BE PLAYED" in r.note()) for r in findings.results] == [False, True]
    assert own.high == pytest.approx(0.625 + math.sqrt((high_1 - 1) ** 2 + (high_2 - 0.25) ** 2) / 2)
    mean = findings.comparisons[0].overall()
    assert mean.difference == pytest.approx((1.0 - 0.25) / 2)
    assert (mean.n, mean.gained, mean.lost, mean.p_value) == (44, 4, 10, mcnemar_exact(4, 10))
    # Half of the spread of the second suite, 40 pairs of which 10 are lost; the first has none, and four pairs only.
    half = 1.96 * math.sqrt(0.25 * 0.75 / 40) / 2
    assert mean.bootstrap == pytest.approx((0.375 - half, 0.375 + half), abs=0.01)
    (low_1, high_1), (low_2, high_2) = tango_interval(4, 0, 4), tango_interval(0, 10, 40)
    assert mean.low == pytest.approx(0.375 - math.hypot(1 - low_1, -0.25 - low_2) / 2) and high_1 == 1.0
    assert mean.high == pytest.approx(0.375 + (high_2 + 0.25) / 2)


def test_each_task_counts_once_under_its_category(tmp_path: Path) -> None:
    """Over suites, for the policy and its baseline, with intervals over tasks; nothing where tasks have none."""

    def evaluated(policy: str, suite: str, category: str, good: int) -> PolicyEvaluation:
        task = dataclasses.replace(list_tasks("toy_reach")[0], suite=suite, category=category)
        tasks = [task, dataclasses.replace(task, task_id=1, name="other")]
        outcomes = [
            EpisodeOutcome(t.task_id, state, state < good + t.task_id, True, 5) for t in tasks for state in range(4)
        ]
        results = [summarize(outcomes, tasks, "heldout", True)]
        protocols = {"greedy": describe_protocol(tasks, SplitConfig(), 4, 0, None)}
        return PolicyEvaluation(policy, {}, protocols, results)

    suites = {}
    for suite, category, good in (("a_swap", "position", 1), ("b_swap", "position", 3), ("a", "", 2)):
        own, base = evaluated("new", suite, category, good), evaluated("old", suite, category, 0)
        suites[suite] = SuiteEvaluation.of(own, [base])
    header, *rows = EvaluationReport.of(suites).categories
    assert header == ("category", "tasks", "episodes", "new, greedy", "old, greedy")
    assert [row[:3] for row in rows] == [("position", "4", "16"), ("-", "2", "8")]
    clusters = [[True] * n + [False] * (4 - n) for n in (1, 2, 3, 4)]
    assert rows[0][3] == str(Rate.of_clusters(clusters)) and rows[0][3].startswith("62.5% [")
    assert rows[0][4].startswith("12.5% [")
    assert suites["a_swap"].own.results[0] == EvalResult.from_dict(suites["a_swap"].own.results[0].as_dict())
    assert EvaluationReport.of({"a": suites["a"]}).categories == []


def test_a_suite_without_pairs_leaves_no_test_over_all() -> None:
    base = _evaluation("b", "two", [True] * 3)
    base.protocols["greedy"]["seed"] = 5
    findings = EvaluationReport.of(
        {
            "one": SuiteEvaluation.of(_evaluation("p", "one", [True]), [_evaluation("b", "one", [False])]),
            "two": SuiteEvaluation.of(_evaluation("p", "two", [True] * 3), [base]),
        }
    )
    (comparison,) = findings.comparisons
    assert not comparison.paired and comparison.overall().p_value is None
    assert "THE PROTOCOLS DIFFER" in comparison.note() and "two: seed 0 and 5" in comparison.note()
    assert comparison.overall().low < 0.5 < comparison.overall().high


def test_only_states_of_the_same_suite_were_trained_on(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    policy = Path(shutil.copytree(policy_folder, tmp_path / "policy"))
    record = json.loads((policy / "rlvla_environment.json").read_text())
    (seen,) = record["learned_from"]
    record["learned_from"] = [seen | {"start": 0, "stop": 9000}]  # as training with --train_init_states notes it
    (policy / "rlvla_environment.json").write_text(json.dumps(record))
    argv = ["--pretrain", policy, *ARGS]
    assert "are used for training and for evaluation" in refused(capsys, *argv)
    main([str(word) for word in [*argv, "--task_suite_name", "mirrored_reach"]])
    assert "no initial state of these tasks was trained on" in capsys.readouterr().out


@pytest.mark.nightly
def test_each_perturbation_is_listed_like_a_suite(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    require_simulator()
    soft_actor_of_primitives(tmp_path / "policy")
    argv = ["--pretrain", tmp_path / "policy", "--num_envs", 1, "--eval_episodes", 2, "--max_steps", 6]
    argv += ["--perturb", "initial_state=1", "instruction=2"]
    main([str(w) for w in [*argv, "--each_perturbation", "--output", tmp_path / "each.json"]])
    content = json.loads((tmp_path / "each.json").read_text())["suites"]
    assert list(content) == ["robosuite", "robosuite, initial_state=1", "robosuite, instruction=2"]
    protocols = [found["protocols"]["greedy"] for found in content.values()]
    assert [protocol.get("perturb") for protocol in protocols] == [None, ["initial_state=1"], ["instruction=2"]]
    printed = capsys.readouterr().out
    assert "condition" in printed and "robosuite, instruction=2" in printed
    assert not json.loads((tmp_path / "each.json").read_text())["mean_of_suites"], "they share their states"
    assert "Success at end by condition" in (tmp_path / "each.md").read_text()
    main([str(w) for w in [*argv, "--output", tmp_path / "both.json"]])
    both = json.loads((tmp_path / "both.json").read_text())
    assert both["protocols"]["greedy"]["perturb"] == ["initial_state=1", "instruction=2"]
    other = [*argv[:-3], "--compare", tmp_path / "both.json", "--output", tmp_path / "plain.json"]
    assert "perturb None and ['initial_state=1', 'instruction=2']" in refused(capsys, *other)
    assert "there is none; give --perturb" in refused(capsys, *argv[:-3], "--each_perturbation")
    text = refused(capsys, *argv[:-3], "--perturb", "fog=1", "distractor=9", "--each_perturbation")
    assert "fog" in text and "integer from 1 to 8" in text


def test_what_the_policy_is_told_is_listed_like_a_suite(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    argv = ["--pretrain", policy_folder, "--num_envs", 1, "--eval_episodes", 3, "--instructions"]
    main([str(w) for w in [*argv, "own", "shuffled", "none", "--output", tmp_path / "told.json"]])
    content = json.loads((tmp_path / "told.json").read_text())["suites"]
    assert list(content) == ["toy_reach", "toy_reach, instructions=shuffled", "toy_reach, instructions=none"]
    protocols = [found["protocols"]["greedy"] for found in content.values()]
    assert [protocol.get("instructions") for protocol in protocols] == [None, "shuffled", "none"]
    assert "condition" in capsys.readouterr().out
    other = [*argv, "none", "--compare", tmp_path / "plain.json", "--output", tmp_path / "none.json"]
    main([str(w) for w in [*argv, "own", "--output", tmp_path / "plain.json"]])
    assert "instructions none and own" in refused(capsys, *other)
    assert "none is given twice" in refused(capsys, *argv, "none", "none")
    push = ["--task_suite_name", "toy_push", "--task_ids", 1]
    assert "have one instruction, 'push the red disc into the yellow zone'" in refused(capsys, *argv, "shuffled", *push)


def test_what_the_policy_sees_is_listed_like_a_suite(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Together with what it is told: all combinations. Videos show the images all the same."""
    argv = ["--pretrain", policy_folder, "--num_envs", 1, "--eval_episodes", 3, "--images"]
    told = ["--instructions", "own", "none", "--num_videos", 1]
    main([str(w) for w in [*argv, "own", "none", *told, "--output", tmp_path / "seen.json"]])
    content = json.loads((tmp_path / "seen.json").read_text())["suites"]
    blind, silent = "images=none", "instructions=none"
    names = ["toy_reach", f"toy_reach, {blind}", f"toy_reach, {silent}", f"toy_reach, {silent}, {blind}"]
    assert list(content) == names
    protocols = [found["protocols"]["greedy"] for found in content.values()]
    assert [protocol.get("images") for protocol in protocols] == [None, "none", None, "none"]
    assert "images=none" in capsys.readouterr().out
    videos = sorted(tmp_path.rglob("*.mp4"))
    assert len(videos) == 4 and all(np.stack(read_video(path)).std() > 10 for path in videos)
    other = [*argv, "none", "--compare", tmp_path / "plain.json", "--output", tmp_path / "none.json"]
    main([str(w) for w in [*argv, "own", "--output", tmp_path / "plain.json"]])
    assert "images none and own" in refused(capsys, *other)
    assert "none is given twice" in refused(capsys, *argv, "none", "none")
    main([str(w) for w in [*argv, "none", "--output", tmp_path / "blind.json"]])
    assert "seed 0; images=none; " in (tmp_path / "blind.md").read_text()
    assert "seed 0; images" not in (tmp_path / "plain.md").read_text()


def test_a_suite_that_cannot_be_perturbed(policy_folder: Path, capsys: pytest.CaptureFixture) -> None:
    text = refused(capsys, "--pretrain", policy_folder, "--perturb", "camera=1", "--each_perturbation")
    assert "perturb" in text and "robosuite" in text

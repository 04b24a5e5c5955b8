"""Comparing runs: which are one group, intervals over seeds, the page and the command."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from cli.compare_runs import main
from rlvla.commands.ppo_flags import PPORun
from rlvla.envs.workers.config import WorkerConfig
from rlvla.evaluation.runs import (
    _WITHOUT_EFFECT,
    Group,
    Run,
    _mean,
    differences,
    group_rows,
    grouped,
    letter_of,
    not_subtracted,
    read_runs,
    render_runs_page,
    run_rows,
)
from rlvla.evaluation.statistics import clustered_interval, newcombe_interval, wilson_interval
from rlvla.utils.errors import ConfigError


def run(folder: str = "run", successes: int | None = 10, n: int = 20, **flags: object) -> Run:
    records: list[dict[str, float]] = [
        {"step": i, "total/episodes": 10.0 * i, "rollout/success_at_end": 0.1 * i, "actor/entropy": 1.0 / i}
        for i in (1, 2, 3)
    ]
    if successes is not None:
        records.insert(0, {"step": 0, "eval/success_at_end": 0.05, "eval/n": n, "total/episodes": 0.0})
        records[-1] |= {"eval/success_at_end": successes / n, "eval/n": n}
    return Run(folder, {"seed": 0, "actor_learning_rate": 1e-3, "save_path": folder, **flags}, records)


def test_runs_that_differ_in_seed_and_places_are_one_group() -> None:
    runs = [
        run("a", seed=0, pretrain="sft_0"),
        run("b", seed=1, pretrain="sft_1", num_envs=7),
        run("c", seed=0, pretrain="sft_0", actor_learning_rate=1e-4),
        run("d", seed=1, pretrain="sft_1", actor_learning_rate=1e-4, gamma=0.9),
    ]
    groups = grouped(runs)
    assert [[r.folder for r in group.runs] for group in groups] == [["a", "b"], ["c"], ["d"]]
    assert [group.name for group in groups] == [
        "actor_learning_rate 0.001, gamma default",
        "actor_learning_rate 0.0001, gamma default",
        "actor_learning_rate 0.0001, gamma 0.9",
    ]
    assert [group.name for group in grouped(runs[:2])] == ["all runs"]


def test_another_start_is_another_group_unless_it_goes_with_the_seed() -> None:
    assert len(grouped([run("a", seed=0, pretrain="x"), run("b", seed=0, pretrain="y")])) == 2
    assert len(grouped([run("a", seed=0, pretrain="x"), run("b", seed=1, pretrain="x")])) == 1
    assert len(grouped([run("a", seed=0, pretrain="x"), run("b", seed=1, pretrain="y")])) == 2
    assert len(grouped([run("a", seed=0, pretrain="r/seed_00/p"), run("b", seed=1, pretrain="r/seed_01/p")])) == 1
    shared = "lr1e-4/sft_2"  # holds the seeds by chance
    assert len(grouped([run(str(s), seed=s, pretrain=shared) for s in (1, 2, 3)])) == 1


def test_starts_from_more_and_from_less_are_not_pooled() -> None:
    runs = [run(str(s), seed=s, pretrain=f"runs/sft{20 if s < 4 else 200}") for s in range(1, 7)]
    assert [[r.seed for r in group.runs] for group in grouped(runs)] == [[1, 2, 3], [4, 5, 6]]
    runs = [run(str(s), seed=s, pretrain=f"sft{20 if s < 4 else 200}/{s}") for s in range(1, 7)]
    groups = grouped(runs)
    assert [group.name for group in groups] == ["pretrain sft20/SEED", "pretrain sft200/SEED"]


def test_flags_of_the_machine_tell_no_groups_apart() -> None:
    workers = {f.name for f in fields(WorkerConfig)}
    assert workers <= _WITHOUT_EFFECT and {"env_python", "zero_stage", "live"} <= _WITHOUT_EFFECT
    flags = {f.name for kind in PPORun.kinds().values() for f in fields(kind)}
    assert flags >= _WITHOUT_EFFECT, "each is a flag"
    assert len(grouped([run("a", env_python="python3"), run("b", seed=1, ray_address="auto")])) == 1


def test_a_run_that_has_only_been_evaluated_before_training_has_no_result_yet() -> None:
    going = run("a", successes=None, seed=0)
    going = replace(going, records=[{"step": 0, "eval/success_at_end": 0.9, "eval/n": 20}, *going.records])
    assert going.last is None and going.first.rate == 0.9
    assert replace(going, flags={**going.flags, "val_only": True}).last.rate == 0.9
    group = Group("g", (going, run("b", seed=1)))
    assert group.rate is None and group_rows([group])[0][2] == run_rows([group])[0][4] == "not evaluated yet"


def test_runs_behind_the_others_are_marked() -> None:
    going = run("a", seed=0)
    going = replace(going, records=[going.records[0], {"step": 2, "eval/success_at_end": 0.5, "eval/n": 20}])
    (group,) = grouped([going, run("b", seed=1)])
    assert group_rows([group])[0][1] == "2, 1 behind"
    assert [row[5] for row in run_rows([group])] == ["2 of 3", "3"]


def test_the_same_seed_again_is_no_further_seed() -> None:
    again = (run("a", 18, seed=1), run("b", 18, seed=1))
    group = Group("g", again)
    assert not group.over_seeds and group_rows([group])[0][3] == "episodes of one seed"
    assert (group.rate.low, group.rate.high) == pytest.approx(wilson_interval(18, 20)) and group.rate.n == 40
    more = Group("h", (*again, run("c", 12, seed=2)))
    assert (more.rate.low, more.rate.high) == clustered_interval([(36, 40), (12, 20)])
    assert group_rows([more])[0][3] == "seeds" and not differences([group, more])[0].over_seeds


def test_the_interval_of_a_group_is_over_seeds() -> None:
    rate = Group("g", tuple(run(successes=good, seed=seed) for seed, good in enumerate((18, 12, 15)))).rate
    assert (rate.rate, rate.n) == (45 / 60, 60)
    assert (rate.low, rate.high) == clustered_interval([(18, 20), (12, 20), (15, 20)])
    alone = Group("g", (run(successes=15),)).rate
    assert (alone.low, alone.high) == wilson_interval(15, 20) and rate.low < wilson_interval(45, 60)[0]
    assert Group("g", (run(), run(successes=None))).rate is None


def test_differences_are_newcombes_where_the_intervals_are_wilsons() -> None:
    groups = [Group(name, (run(successes=good),)) for name, good in (("a", 8), ("b", 15), ("c", None))]
    (d,) = differences(groups)
    assert (d.first, d.second, d.over_seeds) == ("B", "A", False) and d.difference == pytest.approx(7 / 20)
    assert (d.low, d.high) == pytest.approx(newcombe_interval(15, 20, 8, 20))


def test_groups_that_play_different_tasks_are_named_by_them_and_not_subtracted() -> None:
    tasks = ("robosuite, task 0", "robosuite, task 0", "robosuite, task 1", "libero_10, all tasks")
    runs = [replace(run(str(i), gamma=0.9 if i == 1 else 1.0), played=played) for i, played in enumerate(tasks)]
    groups = grouped(runs)
    assert [group.name for group in groups] == [
        "robosuite, task 0: gamma 1",
        "robosuite, task 0: gamma 0.9",
        "robosuite, task 1: gamma 1",
        "libero_10, all tasks: gamma 1",
    ]
    assert [(d.first, d.second) for d in differences(groups)] == [("B", "A")]
    note = "different tasks (A B: robosuite, task 0; C: robosuite, task 1; D: libero_10, all tasks)"
    assert note in not_subtracted(groups) and note in render_runs_page(groups)
    assert not not_subtracted(groups[:2]) and grouped(runs[:1])[0].name == "robosuite, task 0: all runs"


def test_suite_and_tasks_come_from_the_run_configuration(folders: Path) -> None:
    """Flags that a checkpoint decides are not in config.yaml."""
    env = {"task_suite_name": "robosuite", "task_ids": [0, 2]}
    (folders / "a" / "run_config.json").write_text(json.dumps({"env": env}))
    assert [one.played for one in read_runs([str(folders)])] == ["robosuite, tasks 0 2", ""]


def test_a_mean_curve_reaches_as_far_as_all_runs() -> None:
    x, y = _mean([([0.0, 10.0], [0.0, 1.0]), ([2.0, 6.0], [1.0, 1.0])])
    assert (x[0], x[-1]) == (2.0, 6.0) and (y[0], y[-1]) == pytest.approx((0.6, 0.8))


def test_names_and_flags_add_no_markup() -> None:
    nasty = "<script>alert(1)</script>"
    page = render_runs_page(grouped([run(nasty, reward=[nasty]), run("b", reward=["x"])]))
    assert "<script" not in page and "&lt;script" in page


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name, one in (("a", run("a", seed=0, successes=19)), ("b", run("b", seed=1, successes=17))):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(one.flags)))
        (folder / "run_config.json").write_text("{}")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in one.records))
    return tmp_path / "runs"


def test_the_command_writes_tables_and_page(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main([str(folders), "--report", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert "runs / a" in out and "90.0%" in out and "seeds" in out
    figures = json.loads((tmp_path / "out" / "compare_runs.json").read_text())
    assert [r["seed"] for r in figures["groups"][0]["runs"]] == [0, 1] and figures["differences"] == []
    page = (tmp_path / "out" / "compare_runs.html").read_text()
    assert "90.0 %" in page and page.count("<svg") == 3 and "<script" not in page
    assert not [link for link in re.findall(r'(?:src|href)="([^"]*)"', page) if not link.startswith("#")]


def test_groups_have_letters(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Their flags would make a table wider than a terminal."""
    flags = yaml.safe_load((folders / "b" / "config.yaml").read_text())
    (folders / "b" / "config.yaml").write_text(yaml.safe_dump({**flags, "gamma": 0.5, "custom_module": ["x" * 90]}))
    main([str(folders), "--report", str(tmp_path / "out")])
    legend, *tables = capsys.readouterr().out.split("\n\n")
    assert [line[:2] for line in legend.splitlines()] == ["A:", "B:"] and "gamma 0.5" in legend.splitlines()[1]
    assert "B minus A" in tables[2] and max(len(line) for text in tables[:3] for line in text.splitlines()) <= 90
    assert [letter_of(number) for number in (0, 25, 26, 53)] == ["A", "Z", "A1", "B2"]
    figures = json.loads((tmp_path / "out" / "compare_runs.json").read_text())
    assert [group["letter"] for group in figures["groups"]] == ["A", "B"]
    assert "B: custom_module" in (tmp_path / "out" / "compare_runs.html").read_text()


def test_words_may_stand_before_and_behind_flags(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main([str(folders / "a"), "--report", str(tmp_path / "out"), str(folders / "b")])
    assert len(json.loads((tmp_path / "out" / "compare_runs.json").read_text())["groups"][0]["runs"]) == 2


def test_folders_without_runs_are_named(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (folders / "b" / "config.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError) as refused:
        read_runs([str(tmp_path / "none"), str(folders / "b"), str(folders / "a")])
    assert {problem.reason for problem in refused.value.problems} == {"missing_file", "invalid_file"}
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2 and "no run is named" in capsys.readouterr().err

"""`tune_sft_vla.py`: short trials, judged by success."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cli import train_sft_vla, tune_sft_vla
from rlvla.commands import tune_sft
from rlvla.commands.tune_sft import TuneConfig, run_tuning
from rlvla.evaluation.statistics import wilson_interval
from rlvla.utils.errors import ConfigError

PARSER = train_sft_vla.build_parser()
SMALL = ["--pretrain", "compact", "--compact_head", "gaussian", "--train_batch_size", "16", "--no-use_tensorboard"]


@pytest.mark.parametrize(
    ("candidates", "part"),
    [
        ([], "nothing to compare"),
        (["action_chunk_len"], "write FLAG="),
        (["action_chunk_len=[2]"], "different values"),
        (["action_chunk_len=[2,2]"], "different values"),
        (["action_chunk_len=[0,2]"], "action_chunk_len"),
        (["output_dir=[a,b]"], "cannot differ"),
        (["action_chunk_len=[2,5]", "action_chunk_len=[3,4]"], "once per flag"),
        (["no_such_flag=[1,2]"], "no_such_flag"),
        (["action_chunk_len=[2,many]"], "many"),
        (["seed=[0,1]"], "seed cannot differ"),
    ],
)
def test_candidates_that_cannot_be_compared(candidates: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        TuneConfig(tuple(candidates)).combinations(PARSER)


def test_all_combinations() -> None:
    trials = TuneConfig(("action_chunk_len=[5,2]", "learning_rate=[0.001,0.002]")).combinations(PARSER)
    assert [(trial["action_chunk_len"], trial["learning_rate"]) for trial in trials] == [
        (5, 1e-3),
        (5, 2e-3),
        (2, 1e-3),
        (2, 2e-3),
    ]


@pytest.mark.parametrize(
    ("rounds", "most", "epochs", "steps", "choice"),
    [
        ([(80, 90)], 3000, 9000, [800], 2),  # good: the best is taken, however close
        ([(2, 40)], 3000, 9000, [800], 2),  # poor but clear
        ([(2, 0), (3, 45)], 3000, 9000, [800, 1600], 2),  # not clear: twice the steps
        ([(2, 0), (2, 1), (3, 2)], 3000, 9000, [800, 1600, 3000], 5),  # until --max_steps
        ([(0, 0)], 500, 9000, [500], 5),  # none succeeds: the first
        ([(2, 0), (2, 0)], 3000, 1000, [800, 1600], 5),  # --max_epochs ends the trials
    ],
)
def test_rounds_are_repeated_until_the_choice_is_clear(
    rounds: list[tuple[int, int]],
    most: int,
    epochs: int,
    steps: list[int],
    choice: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    played: list[int] = []

    def run(trials: list[dict[str, Any]], number: int, *_: Any) -> list[dict[str, Any]]:
        played.append(number)
        results = []
        for settings, wins in zip(trials, rounds[len(played) - 1]):
            low, high = wilson_interval(wins, 100)
            rate = {"success_at_end": wins / 100, "n": 100, "low": low, "high": high}
            results.append({"settings": settings, "steps": min(number, epochs), **rate})
        return results

    monkeypatch.setattr(tune_sft, "_run_trials", run)
    best = run_tuning([{"action_chunk_len": 5}, {"action_chunk_len": 2}], 800, most, tmp_path, [])
    assert played == steps and best == {"action_chunk_len": choice}
    assert json.loads((tmp_path / "trials.json").read_text())["choice"] == best
    assert f"chosen: --action_chunk_len={choice}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("minutes", "steps"),
    [
        (0.1, [800]),
        (2.9, [800]),
        (3.0, [800, 1600]),
        (6.7, [800, 1600]),
        (6.75, [800, 1600, 3000]),
        (None, [800, 1600, 3000]),
    ],
)
def test_no_round_that_would_not_end_in_time(
    minutes: float | None, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, played = 1000.0, []

    def run(trials: list[dict[str, Any]], number: int, *_: Any) -> list[dict[str, Any]]:
        nonlocal now
        now += 60 * number / 800
        played.append(number)
        return [
            {"settings": trial, "steps": number, "success_at_end": 0.0, "n": 9, "low": 0.0, "high": 0.3}
            for trial in trials
        ]

    monkeypatch.setattr(tune_sft, "_run_trials", run)
    monkeypatch.setattr(tune_sft.time, "monotonic", lambda: now)
    run_tuning([{"action_chunk_len": 5}, {"action_chunk_len": 2}], 800, 3000, tmp_path, [], minutes)
    assert played == steps


@pytest.mark.nightly
@pytest.mark.slow
def test_the_better_rate_is_chosen_and_read_by_the_training(demos_file: Path, tmp_path: Path) -> None:
    """Real trials, some flags from a file: with a rate of nearly 0 a policy does not learn toy_reach."""
    flags = [*SMALL, "--demos", str(demos_file), "--max_epochs", "100"]
    file = tmp_path / "flags.yaml"
    file.write_text("eval_episodes: 30\nmax_steps: 400\ncandidates: ['learning_rate=[1e-7,2e-3]']\n")
    folder = tmp_path / "tune"
    tune_sft_vla.main([*flags, "--config", str(file), "--save_path", str(folder)])
    (first,) = json.loads((folder / "trials.json").read_text())["rounds"]
    bad, good = first["trials"]
    assert bad["high"] < good["low"] and bad["n"] == good["n"] == 30 and bad["steps"] == 400
    choice = folder / "choice.yaml"
    train_sft_vla.main([*flags, "--config", str(choice), "--max_steps", "2", "--save_path", str(tmp_path / "sft")])
    assert "learning_rate: 0.002" in (tmp_path / "sft" / "config.yaml").read_text()
    with pytest.raises(SystemExit):  # its folder is in use
        tune_sft_vla.main([*flags, "--config", str(file), "--save_path", str(folder)])


@pytest.mark.nightly
def test_a_dry_run_checks_the_training_and_starts_no_trial(
    demos_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trials = [*SMALL, "--candidates", "action_chunk_len=[2,4]", "--save_path", str(tmp_path / "tune")]
    tune_sft_vla.main([*trials, "--demos", str(demos_file), "--dry_run"])
    assert "total in host memory" in capfd.readouterr().out
    with pytest.raises(SystemExit) as ended:
        tune_sft_vla.main([*trials, "--demos", str(tmp_path / "none.hdf5")])
    assert ended.value.code == 2 and "none.hdf5" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        tune_sft_vla.main([*trials, "--demos", str(demos_file), "--eval_epochs", "0"])
    assert ended.value.code == 2 and "compared by episodes" in capfd.readouterr().err
    assert not (tmp_path / "tune").exists()


def test_trials_end_with_a_failed_one(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys, time\nsys.exit(3) if '--seed=1' in sys.argv else time.sleep(600)\n")
    started = time.monotonic()
    with pytest.raises(SystemExit, match=r"a trial failed.*log\.txt"):
        tune_sft._run_trials([{"seed": 0}, {"seed": 1}], 10, tmp_path / "trials", [str(program)])
    assert time.monotonic() - started < 60

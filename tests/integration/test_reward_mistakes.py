"""Mistakes in reward flags and in a user's own reward, as they are seen at the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli import train_ppo_vla
from rlvla.checkpoints.run_folder import RUN_FILE

ROOT = Path(__file__).resolve().parents[2]


def refused(policy: Path, folder: Path, capsys: pytest.CaptureFixture, *flags: str) -> str:
    with pytest.raises(SystemExit) as stop:
        train_ppo_vla.main(["--pretrain", str(policy), "--save_path", str(folder), "--reward", "success", *flags])
    assert stop.value.code == 2 and not folder.exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(("formula", "mistake"), [("F(near & & reached)", 9), ("F near )", 7), ("G near @", 7)])
def test_the_caret_stands_below_the_mistake(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, formula: str, mistake: int
) -> None:
    err = refused(policy_folder, tmp_path / "ppo", capsys, "rm:0.5", "--rm_formula", formula)
    lines = err.splitlines()
    caret = next(i for i, line in enumerate(lines) if line.strip() == "^")
    shown, below = lines[caret - 1], lines[caret]
    assert shown.strip() == formula
    assert below.index("^") - shown.index(formula) == mistake, err


def test_a_goal_that_cannot_be_reached(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    err = refused(policy_folder, tmp_path / "ppo", capsys, "rm:0.5", "--rm_formula", "F(near & !near)")
    assert "--rm_formula: no terminal state of the machine can be reached" in err and "contradicts itself" in err


def test_a_reward_function_that_raises(policy_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def score(samples):\n    best = samples[0].finish_step / 0\n    return [best]\n")
    words = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "ppo"), "--num_episodes", "8"]
    words += ["--rollout_batch_size", "8", "--train_batch_size", "8", "--num_envs", "1", "--eval_episodes", "1"]
    words += ["--no-val_before_train", "--no-use_tensorboard"]
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "cli" / "train_ppo_vla.py"),
            *words,
            "--reward",
            "reward_fn:1",
            "--reward_fn",
            f"{mine}:score",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert f"the run was ended: --reward_fn {mine}:score raised ZeroDivisionError" in done.stderr
    assert done.stderr.count("Traceback") == 0 and "ppo_trainer.py" not in done.stderr
    assert f'File "{mine}", line 2, in score' in done.stderr and "ZeroDivisionError" in done.stderr
    assert "best = samples[0].finish_step / 0" in done.stderr
    assert (tmp_path / "ppo" / RUN_FILE).exists()
    with (tmp_path / "ppo" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "of_the_run": "before"}\n')
    train_ppo_vla.main([*words, "--reward", "success"])  # the corrected command, in the same folder
    assert (tmp_path / "ppo" / "policy").is_dir() and "before" not in (tmp_path / "ppo" / "metrics.jsonl").read_text()

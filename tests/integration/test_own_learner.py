"""A learner that a user brings with --custom_module: it trains, is saved, and continues to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.train_ppo_vla import main as train
from rlvla.checkpoints.run_folder import RUN_FILE
from rlvla.utils.files import read_metrics

MODULE = Path(__file__).resolve().parents[2] / "examples" / "plugins" / "filtered_bc.py"
FLAGS = [
    *("--custom_module", str(MODULE), "--algorithm", "filtered_bc", "--reward", "success", "rm:0.5"),
    *("--rm_formula", "F(near)", "--task_suite_name", "toy_reach", "--max_steps", "24", "--temperature", "1.5"),
    *("--num_episodes", "32", "--rollout_batch_size", "8", "--train_batch_size", "8", "--num_envs", "2"),
    *("--actor_learning_rate", "1e-3", "--eval_episodes", "4", "--no-val_before_train", "--no-use_tensorboard"),
    *("--save_steps", "1", "--deterministic_rollout", "--max_idle_iterations", "2"),
    *("--ema_beta", "0.9", "--use_ema"),
]


def run(policy: Path, save_path: Path, *more: str) -> list[dict[str, float]]:
    train(["--pretrain", str(policy), "--save_path", str(save_path), *FLAGS, *more])
    return read_metrics(save_path)


def test_it_trains_and_continues_to_the_bit(policy_folder: Path, tmp_path: Path) -> None:
    whole = run(policy_folder, tmp_path / "whole")
    updates = [record for record in whole if "actor/kept" in record]
    assert [record["total/episodes"] for record in updates] == [8, 16, 24, 32]
    assert updates[-1]["actor/kept"] > 4 and "actor/loss" in updates[-1]
    run(policy_folder, tmp_path / "parts", "--num_episodes", "16")
    continued = run(policy_folder, tmp_path / "parts", "--load_checkpoint")
    names = ("actor/kept", "actor/loss", "rollout/success_once", "total/env_steps")
    for mine, theirs in zip([r for r in continued if "actor/kept" in r], updates):
        assert {n: mine.get(n) for n in names} == {n: theirs.get(n) for n in names}
    first, second = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "parts"))
    start = load_file(policy_folder / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], start[name]) for name in start)
    described = json.loads((tmp_path / "whole" / RUN_FILE).read_text(encoding="utf-8"))
    assert described["algorithm"]["algorithm"] == "filtered_bc"


def test_an_unknown_learner_is_refused(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), "--algorithm", "nothing"]
    with pytest.raises(SystemExit) as ended:
        train(flags)
    assert ended.value.code == 2
    assert "--algorithm" in capsys.readouterr().err and not (tmp_path / "run").exists()

"""A policy family of the user's own, from `--custom_module` to a trained, evaluated and resumed policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.eval_vla import main as evaluate
from cli.inspect_vla import main as inspect
from cli.train_ppo_vla import main as train
from rlvla.models import Actor
from rlvla.utils.files import read_metrics
from tests.support.own_policy import MLPPolicy, write_new

MODULE = ("--custom_module", str(Path(__file__).parents[1] / "support" / "own_policy.py"))
FLAGS = [
    *("--task_suite_name", "toy_reach", "--use_proprio", "--advantage_estimator", "grpo", "--num_envs", "2"),
    *("--rollout_batch_size", "2", "--n_samples_per_prompt", "8", "--train_batch_size", "8", "--max_steps", "24"),
    *("--deterministic_rollout", "--eval_episodes", "2", "--no-use_tensorboard", "--save_steps", "1"),
    *("--actor_learning_rate", "1e-3", "--lr_scheduler", "constant"),
    *("--reward", "success", "rm:0.5"),
    *("--init_kl_coef", "0.01", "--use_kl_loss", "--kl_estimator", "full", "--entropy_loss_coef", "0.001"),
]


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return write_new(tmp_path / "start")


def test_trains_resumes_and_is_evaluated(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = [*MODULE, "--pretrain", str(start), *FLAGS]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train([*flags, "--save_path", str(whole), "--num_episodes", "32"])
    train([*flags, "--save_path", str(parts), "--num_episodes", "16"])
    train([*flags, "--save_path", str(parts), "--num_episodes", "32", "--load_checkpoint"])
    trained, resumed = (load_file(str(run / "policy" / "model.safetensors")) for run in (whole, parts))
    assert all(torch.equal(trained[name], resumed[name]) for name in trained)
    before = load_file(str(start / "model.safetensors"))
    assert all(not torch.equal(trained[name], before[name]) for name in trained)
    steps = [record for record in read_metrics(whole) if "actor/pg_loss" in record]
    assert len(steps) == 2 and "actor/entropy" in steps[0]
    output, policy = tmp_path / "eval.json", whole / "policy"
    evaluate([*MODULE, "--pretrain", str(policy), "--eval_episodes", "3", "--output", str(output)])
    assert json.loads(output.read_text())
    assert type(Actor.from_pretrained(policy)).__name__ == MLPPolicy.__name__


def test_a_dry_run_says_what_it_does_not_know(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = [*MODULE, "--pretrain", str(start), *FLAGS, "--save_path", str(tmp_path / "run"), "--num_episodes", "32"]
    train([*flags, "--dry_run"])
    printed = capsys.readouterr().out
    assert "optimizer steps per iteration" in printed and "memory is not known" in printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--platform", "libero"], "--platform means nothing for test_mlp policies"),
        (["--lora_rank", "2"], "--lora_rank 2: test_mlp policies have no adapters"),
        (["--advantage_estimator", "gae"], "test_mlp policies have no critic"),
        (["--advantage_estimator", "optimal_token_baseline"], "its actions are continuous"),
    ],
)
def test_what_the_family_lacks_is_refused(
    flags: list[str], words: str, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = [*MODULE, "--pretrain", str(start), *FLAGS, "--save_path", str(tmp_path / "run"), "--num_episodes", "32"]
    with pytest.raises(SystemExit) as stop:
        train([*command, *flags])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_type_lists_the_known_ones(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (start / "config.json").write_text(json.dumps({"type": "act"}))
    with pytest.raises(SystemExit):
        train(["--pretrain", str(start), *FLAGS, "--save_path", str(tmp_path / "run"), "--num_episodes", "32"])
    err = capsys.readouterr().err
    assert err.count("model_type is 'act'") == 1 and "openvla" in err and "--custom_module" in err
    with pytest.raises(SystemExit):
        inspect(["--pretrain", str(start)])

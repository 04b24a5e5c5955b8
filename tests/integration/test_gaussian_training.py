"""A regression policy through the commands: supervised start, PPO with adapters and every penalty, export, resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.train_ppo_vla import main as train_ppo
from cli.train_sft_vla import main as train_sft
from rlvla.models.actor import Actor
from rlvla.utils.errors import ConfigError

HEAD, STD = "action_head--0_checkpoint.pt", "action_std.safetensors"
TINY = ["--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1", "--no-use_tensorboard"]


@pytest.fixture(scope="module")
def start(demos_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gaussian")
    train_sft(
        ["--demos", str(demos_file), "--save_path", str(folder), "--action_chunk_len", "4", "--max_epochs", "2", *TINY]
        + ["--model_variant", "oft_regression", "--action_std_init", "0.3", "--zero_stage", "1", "--l2", "0.1"]
    )
    return folder / "policy"


def ppo(start: Path, out: Path, episodes: int, *more: str) -> Path:
    train_ppo(
        ["--pretrain", str(start), "--save_path", str(out), "--task_suite_name", "toy_reach", "--num_envs", "2"]
        + ["--advantage_estimator", "gae", "--share_backbone", "--lora_rank", "2", "--zero_stage", "1"]
        + ["--init_kl_coef", "0.1", "--use_kl_loss", "--kl_estimator", "full", "--entropy_loss_coef", "0.01"]
        + ["--rollout_batch_size", "8", "--train_batch_size", "8", "--n_samples_per_prompt", "1"]
        + [
            "--num_episodes",
            str(episodes),
            "--eval_episodes",
            "2",
            "--actor_learning_rate",
            "1e-2",
            "--save_steps",
            "1",
        ]
        + ["--deterministic_rollout", "--lr_scheduler", "constant", "--no-use_tensorboard", *more]
        + ["--action_noise_correlation", "0.8"]
    )
    return out / "policy"


def test_l1_leaves_the_standard_deviation(start: Path) -> None:
    assert torch.allclose(load_file(start / STD)["log_std"].exp(), torch.tensor(0.3))
    assert json.loads((start / "config.json").read_text())["model_variant"] == "oft_regression"


def test_ppo_trains_head_and_standard_deviation_and_resumes(start: Path, tmp_path: Path) -> None:
    whole = ppo(start, tmp_path / "whole", 16)
    before, after = torch.load(start / HEAD), torch.load(whole / HEAD)
    assert list(before) == list(after) and not torch.equal(
        before["module.model.fc2.bias"], after["module.model.fc2.bias"]
    )
    assert not torch.equal(load_file(start / STD)["log_std"], load_file(whole / STD)["log_std"])
    assert json.loads((whole / "config.json").read_text())["action_noise_correlation"] == 0.8
    Actor.from_pretrained(whole)
    ppo(start, tmp_path / "parts", 8)
    parts = ppo(start, tmp_path / "parts", 16, "--load_checkpoint")
    for file in (HEAD, STD, "model.safetensors"):
        read = load_file if file.endswith(".safetensors") else torch.load
        first, second = read(whole / file), read(parts / file)
        assert all(torch.equal(first[name], second[name]) for name in first), file


def test_settings_of_tokens_are_refused(start: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, SystemExit)):
        ppo(start, tmp_path / "run", 8, "--policy_loss", "dppo_kl")

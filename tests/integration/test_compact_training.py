"""Compact policies through the commands: supervised start, PPO with each kind of critic, resume, reward model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.collect_demos import main as collect_demos
from cli.train_ppo_vla import main as train_ppo
from cli.train_rm_vla import main as train_rm
from cli.train_sft_vla import main as train_sft
from rlvla.models.families import check_checkpoint
from rlvla.utils.files import read_metrics

WEIGHTS = "model.safetensors"
SMALL = ["--compact_channels", "8", "16", "--compact_width", "32", "--no-use_tensorboard", "--action_chunk_len", "4"]
PPO = [
    *("--task_suite_name", "toy_reach", "--num_envs", "2", "--rollout_batch_size", "8", "--train_batch_size", "8"),
    *("--n_samples_per_prompt", "1", "--eval_episodes", "2", "--actor_learning_rate", "1e-2", "--save_steps", "1"),
    *("--deterministic_rollout", "--lr_scheduler", "constant", "--no-use_tensorboard", "--no-val_before_train"),
    *("--reward", "success:1", "rm:0.5"),
]
CRITICS = {
    "shared": "--compact_head gaussian --sft_loss nll|--share_backbone --init_kl_coef 0.1 --use_kl_loss "
    "--kl_estimator full",
    "separate": "--compact_head tokens|--critic_learning_rate 1e-2 --entropy_loss_coef 0.01 --save_value_network",
}


def sft(demos: Path, out: Path, *more: str) -> Path:
    train_sft(["--demos", str(demos), "--pretrain", "compact", "--save_path", str(out), *SMALL, *more])
    return out / "policy"


def ppo(start: Path, out: Path, episodes: int, *more: str) -> Path:
    train_ppo(["--pretrain", str(start), "--save_path", str(out), "--num_episodes", str(episodes), *PPO, *more])
    return out / "policy"


@pytest.mark.parametrize("critic", CRITICS)
def test_ppo_trains_and_resumes_to_the_bit(critic: str, demos_file: Path, tmp_path: Path) -> None:
    of_sft, of_ppo = (words.split() for words in CRITICS[critic].split("|"))
    start = sft(demos_file, tmp_path / "sft", "--max_steps", "2", *of_sft)
    assert len(check_checkpoint(start).spec.missing) > 0
    whole = ppo(start, tmp_path / "whole", 16, *of_ppo)
    before, after = load_file(start / WEIGHTS), load_file(whole / WEIGHTS)
    assert before.keys() == after.keys()
    assert not torch.equal(before["network.join.weight"], after["network.join.weight"])
    ppo(start, tmp_path / "parts", 16, "--max_minutes", "0.0001", *of_ppo)
    assert [row["step"] for row in read_metrics(tmp_path / "parts") if "total/episodes" in row] == [1]
    parts = load_file(ppo(start, tmp_path / "parts", 16, "--load_checkpoint", *of_ppo) / WEIGHTS)
    assert all(torch.equal(after[name], parts[name]) for name in after)
    if critic == "separate":
        check_checkpoint(tmp_path / "whole" / "critic").load_critic()


def test_a_number_of_steps_ends_supervised_training(demos_file: Path, tmp_path: Path) -> None:
    sft(demos_file, tmp_path / "sft", "--max_epochs", "50", "--max_steps", "3", "--train_batch_size", "8")
    assert [row["step"] for row in read_metrics(tmp_path / "sft")] == [3]


def test_a_reward_model_is_trained_from_scratch(tmp_path: Path) -> None:
    errs = ["--offset_prob", "0.5", "--offset_max", "0.5", "--keep", "all", "--num_demos", "16"]
    demos, out = tmp_path / "demos", tmp_path / "rm"
    collect_demos(["--task_suite_name", "toy_reach", "--image_size", "32", *errs, "--output", str(demos)])
    words = ["--demos", str(demos / "demos.hdf5"), "--pretrain", "compact", "--save_path", str(out)]
    train_rm([*words, "--heldout_share", "0.5", "--max_epochs", "1", *SMALL])
    check_checkpoint(out / "reward_model").load_reward_model()

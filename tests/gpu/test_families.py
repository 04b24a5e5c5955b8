"""Policies of every family and learners of every kind on a GPU: trained, resumed to the bit, evaluated."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.collect_demos import main as collect_demos
from cli.eval_vla import main as evaluate
from cli.train_ppo_vla import main as train_ppo
from cli.train_rm_vla import main as train_reward_model
from cli.train_sac_vla import main as train_sac
from cli.train_sft_vla import main as train_sft
from rlvla.utils.files import read_metrics
from tests.support.devices import needs_a_gpu
from tests.support.flow_folders import QUICK, write_flow

pytestmark = needs_a_gpu
PPO = [
    *("--num_episodes", "16", "--rollout_batch_size", "8", "--train_batch_size", "8", "--n_samples_per_prompt", "1"),
    *("--num_envs", "2", "--eval_episodes", "2", "--actor_learning_rate", "1e-3", "--max_steps", "8"),
    *("--lr_scheduler", "constant", "--no-use_tensorboard", "--no-val_before_train", "--deterministic_rollout"),
    *("--reward", "success:1", "rm:0.5"),
]
# Flags of supervised training of a new policy, and of the PPO that follows.
FAMILIES = {
    "compact, gaussian": ("--pretrain compact --compact_head gaussian --sft_loss nll", "--share_backbone"),
    "compact, flow": ("--pretrain compact --compact_head flow", "--advantage_estimator gae"),
    "compact, tokens": ("--pretrain compact --compact_head tokens", "--critic_learning_rate 1e-2"),
    "smolvla": (
        "--model_family smolvla --tiny_vision_dim 32 --tiny_llm_dim 32 --tiny_llm_layers 2 --n_action_steps 4",
        "--n_action_steps 2 --bf16",
    ),
    "openvla": ("--tiny_vision_dim 16 --tiny_llm_dim 32 --tiny_llm_layers 1 --action_chunk_len 4", "--share_backbone"),
}
SAC = [
    *("--num_envs", "2", "--hidden_sizes", "16", "--train_batch_size", "16", "--rollout_batch_size", "4"),
    *("--random_episodes", "4", "--eval_episodes", "2", "--no-val_before_train", "--no-use_tensorboard"),
    *("--deterministic_rollout", "--actor_learning_rate", "1e-2", "--utd_ratio", "1", "--num_episodes", "16"),
    *("--max_steps", "8", "--task_suite_name", "toy_reach", "--use_proprio", "--n_critics", "3"),
]
LEARNERS = {
    "state": ["--action_chunk_len", "3", "--replay_priority", "td"],
    "images": ["--read_images", "--image_size", "16", "--image_shift", "2", "--action_chunk_len", "3"],
    "dsrl": ["--policy", "dsrl", "--image_size", "16", "--repeat_noise"],
}
RESUMED = ["--full_determinism", "--save_steps", "1", "--max_ckpt_num", "4"]


@pytest.fixture(autouse=True)
def _other_kernels_afterwards() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def moved(before: Path, after: Path) -> float:
    """Greatest distance that a weight went; all are finite."""
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    distances = [(new[name].float() - old[name].float()).abs().max() for name in old if old[name].is_floating_point()]
    assert all(torch.isfinite(distance) for distance in distances)
    return float(max(distances))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_supervised_reinforced_resumed_and_evaluated(family: str, demos_file: Path, tmp_path: Path) -> None:
    of_sft, of_ppo = (words.split() for words in FAMILIES[family])
    words = ["--demos", str(demos_file), "--save_path", str(tmp_path / "sft"), "--no-use_tensorboard"]
    train_sft([*words, "--max_epochs", "1", *of_sft])
    start, out = tmp_path / "sft" / "policy", tmp_path / "ppo"
    flags = ["--pretrain", str(start), *PPO, *RESUMED, *of_ppo]
    train_ppo([*flags, "--save_path", str(out)])
    assert moved(start, out / "policy") > 1e-4
    again = shutil.copytree(out, tmp_path / "again")
    train_ppo([*flags, "--save_path", str(again), "--load_checkpoint", "iteration_000001"])
    assert moved(out / "policy", again / "policy") == 0
    records = [record for record in read_metrics(out) if "actor/grad_norm" in record]
    assert len(records) == 2 and all(0 < record["actor/grad_norm"] < float("inf") for record in records)
    assert all(record["perf/max_memory_allocated_gb"] > 0 for record in records), "it was the GPU that computed"
    evaluate(["--pretrain", str(out / "policy"), "--eval_episodes", "2", "--output", str(tmp_path / "eval.json")])
    assert (tmp_path / "eval.json").is_file()


def test_a_flow_policy_trains_in_groups(tmp_path: Path) -> None:
    base, out = write_flow(tmp_path / "base"), tmp_path / "run"
    train_ppo(["--pretrain", str(base), "--save_path", str(out), *QUICK])
    assert moved(base, out / "policy") > 1e-4


@pytest.mark.parametrize("learner", LEARNERS)
def test_an_off_policy_learner_trains_and_resumes(learner: str, tmp_path: Path) -> None:
    base = write_flow(tmp_path / "base")
    frozen = ["--pretrain", str(base)] if learner == "dsrl" else []
    flags = [*SAC, *RESUMED, *LEARNERS[learner], *frozen]
    train_sac([*flags, "--save_path", str(tmp_path / "run")])
    again = shutil.copytree(tmp_path / "run", tmp_path / "again")
    train_sac([*flags, "--save_path", str(again), "--load_checkpoint", "iteration_000002"])
    assert moved(tmp_path / "run" / "policy", again / "policy") == 0
    losses = [record["critic/loss"] for record in read_metrics(tmp_path / "run") if "critic/loss" in record]
    assert len(losses) > 1 and all(0 < loss < float("inf") for loss in losses)
    evaluate(["--pretrain", str(tmp_path / "run" / "policy"), "--eval_episodes", "2"])


def test_a_learned_reward_model_judges_a_run(policy_folder: Path, tmp_path: Path) -> None:
    errs = ["--keep", "all", "--offset_prob", "0.6", "--offset_max", "0.6", "--use_proprio", "--num_demos", "24"]
    collect_demos(["--task_suite_name", "toy_reach", *errs, "--output", str(tmp_path / "demos")])
    words = ["--demos", str(tmp_path / "demos"), "--save_path", str(tmp_path / "rm"), "--no-use_tensorboard"]
    train_reward_model([*words, "--pretrain", str(policy_folder), "--max_epochs", "1"])
    judged = ["--reward", "success:1", "rm_model:0.5", "--rm_model_path", str(tmp_path / "rm" / "reward_model")]
    out = tmp_path / "ppo"
    train_ppo(["--pretrain", str(policy_folder), "--save_path", str(out), *PPO, *judged])
    assert moved(policy_folder, out / "policy") > 1e-4

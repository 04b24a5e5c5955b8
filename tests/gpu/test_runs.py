"""Training runs on a GPU, in the settings that exist for GPUs alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from cli.train_ppo_vla import main as train
from rlvla.utils.files import read_metrics
from tests.support.devices import needs_a_gpu

pytestmark = needs_a_gpu
FLAGS = [
    *("--num_episodes", "8", "--rollout_batch_size", "4", "--train_batch_size", "2", "--num_envs", "1"),
    *("--eval_episodes", "2", "--no-val_before_train", "--max_steps", "16", "--no-use_tensorboard"),
    *("--reward", "success", "rm:0.5", "--rm_formula", "F(near)", "--temperature", "1.5"),
    *("--init_kl_coef", "0.1", "--actor_learning_rate", "1e-3", "--deterministic_rollout"),
]


def weights_after(policy_folder: Path, folder: Path, *flags: str) -> dict[str, torch.Tensor]:
    """Weights of a run of two iterations, whose metrics have been looked at."""
    train(["--pretrain", str(policy_folder), "--save_path", str(folder), *FLAGS, *flags])
    records = [record for record in read_metrics(folder) if "actor/grad_norm" in record]
    assert len(records) == 2 and all(0 < record["actor/grad_norm"] < float("inf") for record in records)
    return load_file(folder / "policy" / "model.safetensors")


@pytest.mark.parametrize(
    "flags",
    [
        *(["--zero_stage", stage] for stage in "0123"),
        *(["--zero_stage", stage, "--bf16"] for stage in "023"),
        ["--zero_stage", "2", "--bf16", "--adam_offload"],
        ["--zero_stage", "3", "--bf16", "--param_offload"],
        ["--zero_stage", "2", "--bf16", "--lora_rank", "4", "--gradient_checkpointing"],
    ],
    ids=" ".join,
)
def test_a_run_trains_and_ends(policy_folder: Path, tmp_path: Path, flags: list[str]) -> None:
    after, before = weights_after(policy_folder, tmp_path, *flags), load_file(policy_folder / "model.safetensors")
    moved = [(after[name].float() - before[name].float()).abs().max() for name in before]
    assert all(torch.isfinite(distance) for distance in moved) and float(max(moved)) > 1e-4


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_offloading_changes_nothing(policy_folder: Path, tmp_path: Path, stage: str) -> None:
    """With deterministic kernels; the backward pass of memory-efficient attention has none."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            stays = weights_after(policy_folder, tmp_path / "stays", "--zero_stage", stage)
            moves = weights_after(policy_folder, tmp_path / "moves", "--zero_stage", stage, "--offload_during_rollout")
    finally:
        torch.use_deterministic_algorithms(False)
    for name in stays:
        assert torch.allclose(stays[name], moves[name], atol=1e-6), name


def test_the_flash_kernel_trains(policy_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("flash_attn", reason="the flash-attn package is not installed")
    weights_after(policy_folder, tmp_path, "--bf16", "--attn_implementation", "flash_attention_2")

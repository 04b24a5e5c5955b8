"""Every DeepSpeed and memory option on one rank: it runs, it learns, and it exports a policy that loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.train_ppo_vla import main as train
from rlvla.models.actor import Actor
from rlvla.utils.files import read_metrics

pytestmark = pytest.mark.slow

Weights = dict[str, torch.Tensor]
FLAGS = [
    *("--num_episodes", "16", "--rollout_batch_size", "8", "--train_batch_size", "4", "--num_envs", "1"),
    *("--eval_episodes", "2", "--no-val_before_train", "--no-use_tensorboard"),
    *("--entropy_loss_coef", "0.05", "--actor_learning_rate", "3e-4", "--max_steps", "8"),
]


def run(policy: Path, save_path: Path, *flags: str) -> Weights:
    """Train two iterations and return the exported weights in float32."""
    train(["--pretrain", str(policy), "--save_path", str(save_path), *FLAGS, *flags])
    return weights(save_path / "policy")


def weights(folder: Path) -> Weights:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def change(after: Weights, before: Weights) -> torch.Tensor:
    assert after.keys() == before.keys()
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(after)])


@pytest.fixture(scope="module")
def plain(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Weights of a run without options."""
    return run(policy_folder, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    "flags",
    [
        ("--zero_stage", "3"),
        ("--zero_stage", "2", "--adam_offload"),
        ("--gradient_checkpointing",),
        ("--micro_train_batch_size", "3", "--micro_rollout_batch_size", "5"),
        pytest.param(("--num_envs", "3"), marks=pytest.mark.nightly),
        pytest.param(("--zero_stage", "1"), marks=pytest.mark.nightly),
        pytest.param(("--zero_stage", "2"), marks=pytest.mark.nightly),
        pytest.param(("--zero_stage", "1", "--adam_offload"), marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_options_of_speed_and_memory_change_no_weight(
    plain: Weights, policy_folder: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    after = run(policy_folder, tmp_path / "run", *flags)
    start = weights(policy_folder)
    assert float(change(plain, start).abs().max()) > 5e-4, "the run must do something"
    # Adam turns rounding noise of near-zero gradients into steps: few weights may differ, and by no more than steps
    moved, wanted = change(after, start), change(plain, start)
    assert float(torch.cosine_similarity(moved, wanted, dim=0)) > 0.999
    Actor.from_pretrained(tmp_path / "run" / "policy")


@pytest.mark.parametrize(
    "flags",
    [
        ("--bf16",),
        pytest.param(("--bf16", "--zero_stage", "3"), marks=pytest.mark.nightly),
        pytest.param(("--bf16", "--zero_stage", "2"), marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_bf16_trains_in_nearly_the_same_direction(
    plain: Weights, policy_folder: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    after, start = run(policy_folder, tmp_path / "run", *flags), weights(policy_folder)
    stored = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    moved, wanted = change(after, start), change(plain, start)
    assert torch.isfinite(moved).all()
    assert float(torch.cosine_similarity(moved, wanted, dim=0)) > 0.25, "rounding of the weights hides small steps"
    assert all(r["actor/grad_norm"] > 0 for r in read_metrics(tmp_path / "run") if "actor/grad_norm" in r)
    Actor.from_pretrained(tmp_path / "run" / "policy")


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ["0", "3"])
def test_lora_trains_resumes_and_exports_a_merged_policy(policy_folder: Path, tmp_path: Path, stage: str) -> None:
    lora = ("--lora_rank", "4", "--zero_stage", stage, "--lr_scheduler", "constant", "--actor_learning_rate", "1e-2")
    whole = run(policy_folder, tmp_path / "whole", *lora)
    again = run(policy_folder, tmp_path / "again", *lora)
    assert all(torch.equal(whole[name], again[name]) for name in whole), "adapters start from the run's seed"
    run(policy_folder, tmp_path / "parts", *lora, "--num_episodes", "8")
    parts = run(policy_folder, tmp_path / "parts", *lora, "--load_checkpoint")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)

    start = weights(policy_folder)
    changed = {name for name in start if not torch.equal(whole[name], start[name])}
    assert changed and all("language_model" in name and "_proj" in name for name in changed)
    evaluated = Actor.from_pretrained(tmp_path / "whole" / "policy")
    assert evaluated.config.lora_rank == 0


def test_weights_do_not_move_at_learning_rate_zero(policy_folder: Path, tmp_path: Path) -> None:
    after, start = run(policy_folder, tmp_path / "run", "--actor_learning_rate", "0"), weights(policy_folder)
    assert not change(after, start).any()


def test_a_frozen_actor_waits_for_the_critic(policy_folder: Path, tmp_path: Path) -> None:
    """It moves in the second of two iterations only."""
    run(policy_folder, tmp_path / "run", "--freezing_actor_steps", "1")
    records = [r for r in read_metrics(tmp_path / "run") if "critic/grad_norm" in r]
    assert ["actor/grad_norm" in r for r in records] == [False, True]

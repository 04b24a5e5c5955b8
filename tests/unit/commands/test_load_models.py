"""Which memory options reach which network of a PPO run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cli.train_ppo_vla import build_parser
from rlvla.commands.load_models import load_models
from rlvla.commands.ppo_checks import check
from rlvla.commands.ppo_flags import PPORun
from rlvla.models.value_models import Critic, RewardModel
from rlvla.models.vla import family, openvla
from rlvla.trainer.models import Models
from rlvla.utils.errors import ConfigError


def models_of(policy: Path, folder: Path, *flags: str) -> Models:
    given = build_parser().parse_args(["--pretrain", str(policy), "--save_path", str(folder / "run"), *flags])
    run = PPORun.from_namespace(given)
    return load_models(run, check(run))


def with_files_of(policy: Path, folder: Path) -> str:
    """The folder with what a network's own files leave out: tokenizer, statistics."""
    for file in policy.iterdir():
        if file.is_file() and not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def towers(model: nn.Module) -> set[bool]:
    return {p.requires_grad for name, p in model.named_parameters() if "vision_backbone." in name}


def others(model: nn.Module) -> set[bool]:
    return {p.requires_grad for name, p in model.named_parameters() if "vision_backbone." not in name}


@pytest.mark.parametrize("own_start", [False, True])
def test_the_critic_is_trained_like_the_actor(policy_folder: Path, tmp_path: Path, own_start: bool) -> None:
    start = []
    if own_start:
        Critic.from_pretrained(policy_folder).save_pretrained(tmp_path / "critic")
        start = ["--critic_pretrain", with_files_of(policy_folder, tmp_path / "critic")]
    plain = models_of(policy_folder, tmp_path, *start)
    assert True in towers(plain.critic) and not plain.critic.vla.gradient_checkpointing
    lean = models_of(policy_folder, tmp_path, *start, "--freeze_vision_backbone", "--gradient_checkpointing")
    for model in (lean.actor, lean.critic):
        assert towers(model) == {False} and True in others(model)
        assert model.vla.gradient_checkpointing and model.vla.vision_backbone.featurizer.gradient_checkpointing


def test_with_adapters_on_the_actor_the_critic_has_none(policy_folder: Path, tmp_path: Path) -> None:
    critic = models_of(policy_folder, tmp_path, "--lora_rank", "2", "--freeze_vision_backbone").critic
    assert towers(critic) == {False} and True in others(critic)
    assert not any("lora" in name for name, _ in critic.named_parameters())


def test_every_network_of_the_run_takes_the_kernel(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (openvla, family):  # the package is not there; loading computes nothing
        monkeypatch.setattr(module, "require_flash_attention", lambda: None)
    with pytest.raises(ConfigError, match="half precision only; give --bf16"):
        models_of(policy_folder, tmp_path, "--attn_implementation", "flash_attention_2")
    for kernel in ("sdpa", "flash_attention_2"):
        found = models_of(policy_folder, tmp_path, "--init_kl_coef", "0.1", "--bf16", "--attn_implementation", kernel)
        networks = [found.actor, found.critic, found.reference.actor]
        assert [network.vla.attn_implementation for network in networks] == [kernel] * 3


def test_a_critic_starts_from_the_reward_model_with_a_head_at_zero(policy_folder: Path, tmp_path: Path) -> None:
    reward = RewardModel.from_policy(policy_folder)
    with torch.no_grad():
        for parameter in reward.parameters():
            parameter.add_(0.01)
    reward.save_pretrained(tmp_path / "reward")
    folder = with_files_of(policy_folder, tmp_path / "reward")
    for flags in (
        ["--reward_pretrain", folder],
        ["--reward", "success", "rm_model:0.5", "--rm_model_path", folder],
    ):
        critic = models_of(policy_folder, tmp_path, *flags, "--critic_from", "rm_model").critic
        wanted = reward.vla.state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in critic.vla.state_dict().items())
        assert not any(parameter.any() for parameter in critic.head.parameters())

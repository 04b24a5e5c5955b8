"""Checks of the initial policy before training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cli.eval_vla import main as evaluate
from cli.train_ppo_vla import main as train_ppo
from rlvla.checkpoints.policy_folder import check_first_decisions
from rlvla.envs.base import Observation
from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.families import check_checkpoint, checkpoint_overrides
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.family import OpenVLACheckpoint, statistics_problems
from rlvla.utils.errors import ConfigError


@pytest.fixture
def copy(policy_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(policy_folder, tmp_path / "copy")


def observations() -> list[Observation]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 1, 64, 64, 3), dtype=np.uint8)
    return [Observation(image, rng.random(2).astype(np.float32), "reach the red disc") for image in images]


def test_tokens_at_the_uniform_level_are_refused(policy_folder: Path) -> None:
    actor = Actor.from_pretrained(policy_folder)
    checkpoint = check_checkpoint(policy_folder)
    check_first_decisions(checkpoint, actor, observations())
    with torch.no_grad():
        actor.vla.language_model.lm_head.weight.mul_(1e-3)
    with pytest.raises(ConfigError, match="as good as random: their entropy is 100"):
        check_first_decisions(checkpoint, actor, observations())


def test_training_does_not_start_with_random_tokens(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    actor = Actor.from_pretrained(copy)
    with torch.no_grad():
        actor.vla.language_model.lm_head.weight.mul_(1e-3)
    actor.save_pretrained(copy)
    with pytest.raises(SystemExit) as caught:
        train_ppo(
            ["--pretrain", str(copy), "--save_path", str(tmp_path / "run"), "--num_envs", "1", "--num_episodes", "4"]
            + ["--rollout_batch_size", "4", "--train_batch_size", "4", "--eval_episodes", "1", "--no-use_tensorboard"]
        )
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "as good as random" in printed.err and "iteration" not in printed.out


@pytest.mark.parametrize("command", [train_ppo, evaluate])
def test_a_regression_head_is_refused(copy: Path, tmp_path: Path, command, capsys: pytest.CaptureFixture) -> None:
    torch.save({}, copy / "action_head--150000_checkpoint.pt")
    with pytest.raises(SystemExit):
        command(["--pretrain", str(copy)] + (["--save_path", str(tmp_path / "run")] if command is train_ppo else []))
    assert "its actions come from that regression head" in capsys.readouterr().err


def test_supervised_training_leaves_the_regression_head_behind(copy: Path, tmp_path: Path) -> None:
    torch.save({}, copy / "action_head--150000_checkpoint.pt")
    actor = Actor.from_pretrained(copy)
    actor.forget_action_heads()
    actor.save_pretrained(tmp_path / "out")
    assert not list((tmp_path / "out").glob("action_head*"))


def test_statistics_of_another_robot() -> None:
    config = OpenVLAConfig(use_proprio=True, proprio_dim=8)
    action = {"q01": [0] * 7, "q99": [1] * 7, "mask": [True] * 7}
    assert statistics_problems(config, {"action": action, "proprio": {"q01": [0] * 8, "q99": [1] * 8}}) == []
    (lacking,) = statistics_problems(config, {"action": action, "proprio": {"min": [0] * 8, "max": [1] * 8}})
    assert "the proprio statistics lack q01, q99, and config.json asks for q99" in lacking
    found = statistics_problems(config, {"action": {"q01": [0] * 14, "q99": [1] * 14}})
    assert len(found) == 2
    assert "action statistics have [14] dimensions" in found[0] and "proprio statistics are missing" in found[1]


def test_adapters_need_a_place() -> None:
    config = OpenVLAConfig(
        text_config={"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        image_sizes=[28, 28],
        timm_model_kwargs=[{"embed_dim": 16, "depth": 2, "num_heads": 2}] * 2,
    )
    problems = OpenVLACheckpoint(Path(), config, "", {}).option_problems
    assert problems(ActorConfig(lora_rank=2, lora_targets=("q_proj", "fc1"))) == []
    found = problems(ActorConfig(lora_rank=2, lora_targets=("qproj", "langage")))
    assert [(problem.flag, problem.reason) for problem in found] == [("lora_targets", "unknown_name")] * 2
    assert "qproj" in found[0] and "q_proj" in found[0] and "langage" in found[1]
    frozen = ActorConfig(lora_rank=2, lora_targets=("attn.qkv",), freeze_vision_backbone=True)
    assert "attn.qkv matches no layer" in problems(frozen)[0]
    assert "flash-attn" in problems(ActorConfig(attn_implementation="flash_attention_2"))[0]


def test_a_chunk_length_completes_a_file_that_is_silent(copy: Path) -> None:
    flags = SimpleNamespace(center_crop=None, model_variant="oft", platform=None, action_chunk_len=5)
    assert checkpoint_overrides(copy, flags) == {"model_variant": "oft"}, "config.json says 4, which stands"
    path = copy / "config.json"
    content = json.loads(path.read_text())
    del content["action_chunk_len"]
    path.write_text(json.dumps(content))
    assert checkpoint_overrides(copy, flags) == {"model_variant": "oft", "action_chunk_len": 5}


@pytest.mark.parametrize("targets", [("language",), ("all-linear",), ("q_proj", "attn.proj")])
def test_adapters_sit_where_they_were_wanted(policy_folder: Path, targets: tuple[str, ...]) -> None:
    actor = Actor.from_pretrained(policy_folder, ActorConfig(lora_rank=2, lora_targets=targets))
    stems = {name.split(".lora_")[0] for name, p in actor.named_parameters() if p.requires_grad}
    parts = {stem.removeprefix("vla.base_model.model.").split(".")[0] for stem in stems}
    wanted = {
        "language": {"language_model"},
        "all-linear": {"language_model", "vision_backbone", "projector", "proprio_projector"},
        "q_proj": {"language_model", "vision_backbone"},
    }
    assert parts == wanted[targets[0]]
    assert not any("lm_head" in stem or "attn_pool" in stem or "blocks.2" in stem for stem in stems)
    if targets[0] == "q_proj":
        assert {stem.rsplit(".", 1)[1] for stem in stems} == {"q_proj", "proj"}


def test_frozen_vision_gets_no_gradient(policy_folder: Path) -> None:
    actor = Actor.from_pretrained(policy_folder, ActorConfig(freeze_vision_backbone=True))
    trained = {name.split(".")[1] for name, p in actor.named_parameters() if p.requires_grad}
    assert trained == {"projector", "proprio_projector", "language_model"}

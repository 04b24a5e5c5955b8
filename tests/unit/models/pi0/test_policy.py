"""pi0 and pi0.5 on the policy contract."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rlvla.memory.probe import probe
from rlvla.models import Actor
from rlvla.models.config import ActorConfig
from rlvla.models.families import check_checkpoint, family_of
from rlvla.models.inspection import describe
from rlvla.models.lerobot.new import NewPolicyFacts
from rlvla.models.lerobot.settings import SETTINGS_FILE
from rlvla.models.pi0.config import GemmaSizes, Sizes, VisionSizes
from rlvla.models.testing import PolicyContract
from rlvla.utils.errors import ConfigError
from tests.support.tiny_pi0 import build_tiny_pi0

SIZES = Sizes(
    vlm=GemmaSizes(width=24, depth=2, mlp_width=32, heads=2, head_dim=8),
    expert=GemmaSizes(width=16, depth=2, mlp_width=24, heads=2, head_dim=8),
    vision=VisionSizes(width=16, depth=1, mlp_width=24, heads=2, patch_size=16),
    vocabulary=512,
)
STATISTICS = {
    "observation.state": {"mean": [0.1, -0.2], "std": [1.0, 2.0], "q01": [-1.0, -2.0], "q99": [1.0, 1.0]},
    "action": {"mean": [0.5, -0.5, 0.0], "std": [0.5, 0.2, 1.0], "q01": [-1.0] * 3, "q99": [1.0, 2.0, 0.5]},
}


def build(folder: Path, family: str, settings: dict[str, Any]) -> Path:
    """Two of three actions are executed; states and actions are padded, cameras in another order than the features."""
    build_tiny_pi0(
        folder,
        sentences=PolicyContract.instructions,
        statistics=STATISTICS,
        family=family,
        cameras=("top", "wrist"),
        sizes=SIZES,
        image_size=32,
        chunk_size=3,
        n_action_steps=2,
        state_dim=2,
        max_state_dim=4,
        action_dim=3,
        max_action_dim=5,
        num_inference_steps=3,
        tokenizer_max_length=16 if family == "pi0" else 140,
    )
    cameras = {"cameras": ["hand", "top"], "camera_map": {"hand": "observation.images.wrist"}}
    cameras["camera_map"]["top"] = "observation.images.top"
    (folder / SETTINGS_FILE).write_text(json.dumps({**cameras, **settings}))
    return folder


class TestPi0(PolicyContract):
    value_head = True
    family: ClassVar = "pi0"
    settings: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return build(tmp_path_factory.mktemp("pi0") / "policy", cls.family, cls.settings)

    def test_freed_parameters_are_those_that_features_need(self, folder: Path) -> None:
        policy: Any = check_checkpoint(folder).load_policy(self.config)
        policy.freeze_read_out()
        trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
        policy.features(self.batch(policy, self.decide(policy, None).trace)).sum().backward()
        assert trained == {name for name, parameter in policy.named_parameters() if parameter.grad is not None}

    def test_cameras_must_be_mapped(self, folder: Path) -> None:
        family = family_of(folder)
        given = family.overrides(folder, {"camera_map": ("front=top", "hand=wrist"), "cameras": ("front", "hand")})
        assert check_checkpoint(folder, overrides=given).spec.cameras == 2
        given = family.overrides(folder, {"camera_map": ("front=top",), "cameras": ("front", "hand")})
        with pytest.raises(ConfigError) as error:
            check_checkpoint(folder, overrides=given)
        assert {problem.flag for problem in error.value.problems} == {"camera_map"}

    def test_fewer_actions_may_be_executed(self, folder: Path, tmp_path: Path) -> None:
        given = family_of(folder).overrides(folder, {"action_chunk_len": 1})
        policy: Any = check_checkpoint(folder, overrides=given).load_policy()
        policy.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["n_action_steps"] == 1
        given = family_of(folder).overrides(folder, {"action_chunk_len": 4})
        with pytest.raises(ConfigError) as error:
            check_checkpoint(folder, overrides=given)
        assert [problem.flag for problem in error.value.problems] == ["action_chunk_len"]

    def test_an_actor_reads_the_folder(self, folder: Path) -> None:
        actor = Actor.from_pretrained(folder)
        assert actor.spec.action_chunk_len == 2

    def test_a_folder_is_described(self, folder: Path) -> None:
        described = describe(folder)
        assert described.trainable and described.facts["family"] == self.family
        assert "hand" in described.facts["image features"] and "2 executed" in described.facts["chunk"]


class TestPi05(TestPi0):
    family = "pi05"


class TestLearnedNoise(TestPi05):
    settings: ClassVar = {"flow_method": "noise", "flow_noisy_steps": "all", "critic_features": "prefix"}


class TestExpertOnly(TestPi0):
    config = ActorConfig(train_expert_only=True)


class TestAdapters(TestPi0):
    config = ActorConfig(lora_rank=2, train_expert_only=True)


def test_memory_can_be_estimated(tmp_path: Path) -> None:
    checkpoint = check_checkpoint(build(tmp_path, "pi05", {}))
    config = ActorConfig(train_expert_only=True)
    build_sketch = checkpoint.sketch(checkpoint.row_shape(PolicyContract.instructions, 2), config)
    estimate = probe(build_sketch, bf16=True, train_rows=2, forward_rows=2, play_rows=2)
    assert estimate.parameters == sum(p.numel() for p in checkpoint.load_policy(config).parameters())
    assert 0 < estimate.trainable < estimate.parameters and estimate.backward_bytes >= estimate.forward_bytes > 0


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    folder = build(tmp_path / "policy", "pi05", {})
    shutil.rmtree(folder / "google")
    (folder / "policy_postprocessor.json").unlink()
    with pytest.raises(ConfigError) as error:
        check_checkpoint(folder, overrides={"action_chunk_len": 4, "cameras": ("front", "side")})
    assert {(problem.flag, problem.reason) for problem in error.value.problems} == {
        (None, "missing_file"),
        ("action_chunk_len", "mismatch"),
        ("camera_map", "mismatch"),
    }
    text = str(error.value)
    assert "hf download google/paligemma" in text and "policy_postprocessor.json" in text


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_estimated_prompts_are_as_long_as_real_ones(family: str, tmp_path: Path) -> None:
    checkpoint: Any = check_checkpoint(build(tmp_path / "policy", family, {}))
    checkpoint.files.tokenizer.padding = "longest"
    texts = list(PolicyContract.instructions)
    tokens, _ = checkpoint.files.prompts(texts, torch.zeros(len(texts), 2))
    assert checkpoint.row_shape(texts, 2).prompt_tokens == tokens.shape[1]


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_weights_can_be_taken_to_other_data(family: str, tmp_path: Path) -> None:
    folder = build(tmp_path / "policy", family, {"lerobot_inputs": "0.4"})
    ranges = {"proprio": 4, "action": 5}
    statistics = {
        name: {"mean": [0.3] * size, "std": [2.0] * size, "q01": [0.0] * size, "q99": [1.0] * size}
        for name, size in ranges.items()
    }
    facts = NewPolicyFacts(["push the cube"], statistics, "pushes", ("front",), (24, 24), 3, 4, 5)
    assert not check_checkpoint(folder).refitted(tmp_path / "new", facts)
    new = check_checkpoint(tmp_path / "new")
    assert (new.spec.cameras, new.spec.proprio_dim, new.spec.action_dim) == (1, 4, 5)
    described = describe(tmp_path / "new").facts
    assert described["image features"] == "observation.images.front (front)"
    assert described["inputs"].startswith("as in LeRobot 0.4 (recorded")

"""SmolVLA on the policy contract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlvla.models.config import ActorConfig
from rlvla.models.lerobot.settings import SETTINGS_FILE
from rlvla.models.smolvla.tiny import TinyVlm, build_tiny_smolvla
from rlvla.models.testing import PolicyContract

VLM = TinyVlm(image_size=32, patch_size=8, vision_dim=32, vision_depth=1, dim=32, layers=2)
STATISTICS = {
    "observation.state": {"mean": [0.1, -0.2], "std": [1.0, 2.0]},
    "action": {"mean": [0.5, -0.5, 0.0], "std": [0.5, 0.2, 1.0]},
}


def build(folder: Path, settings: dict[str, Any], **config: Any) -> Path:
    """Two of three actions are executed; states and actions are padded, cameras in another order than the features."""
    build_tiny_smolvla(
        folder,
        sentences=PolicyContract.instructions,
        statistics=STATISTICS,
        cameras=("top", "wrist"),
        vlm=VLM,
        chunk_size=3,
        n_action_steps=2,
        state_dim=2,
        max_state_dim=4,
        action_dim=3,
        max_action_dim=5,
        num_steps=3,
    )
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **config}))
    cameras = {"cameras": ["hand", "top"], "camera_map": {"hand": "observation.images.wrist"}}
    cameras["camera_map"]["top"] = "observation.images.top"
    (folder / SETTINGS_FILE).write_text(json.dumps({**cameras, **settings}))
    return folder


class TestSmolVLA(PolicyContract):
    value_head = True
    settings: ClassVar[dict[str, Any]] = {}
    files: ClassVar = ()

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return build(tmp_path_factory.mktemp("smolvla") / "policy", cls.settings)


class TestLearnedNoise(TestSmolVLA):
    settings: ClassVar = {"flow_method": "noise", "flow_noisy_steps": "all", "critic_features": "prefix"}


class TestExpertOnly(TestSmolVLA):
    config = ActorConfig(train_expert_only=True)


class TestAdapters(TestSmolVLA):
    config = ActorConfig(lora_rank=2, train_expert_only=True)


class TestStepByStep(TestSmolVLA):
    overrides: ClassVar = {"flow_asked_scores": "step_log_probs"}
    settings: ClassVar = {"flow_noisy_steps": "all", "critic_features": "prefix"}


class TestWithoutNoise(TestSmolVLA):
    value_head = False
    settings: ClassVar = {"flow_method": "ode"}

"""Tiny folders of pi0 and pi0.5."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlvla.models.pi0.checkpoint import Pi0Files, check_pi0
from rlvla.models.pi0.config import GemmaSizes, Sizes, VisionSizes
from tests.support.lerobot_cases import edit
from tests.support.tiny_pi0 import build_tiny_pi0

SMALL = Sizes(
    vlm=GemmaSizes(width=32, depth=3, mlp_width=48, heads=4, head_dim=8),
    expert=GemmaSizes(width=24, depth=3, mlp_width=32, heads=4, head_dim=8),
    vision=VisionSizes(width=16, depth=1, mlp_width=24, heads=2, patch_size=16),
    vocabulary=512,
)
STATISTICS = {
    "observation.state": {"mean": [0.1, 0.2, 0.3], "std": [1.0, 2.0, 3.0], "q01": [-1.0] * 3, "q99": [3.0] * 3},
    "action": {"mean": [0.5, -0.5], "std": [0.1, 0.2], "q01": [-2.0, 0.0], "q99": [2.0, 1.0]},
}
SENTENCES = ("pick up the cube", "open the drawer")


def build(folder: Path, family: str) -> Path:
    return build_tiny_pi0(
        folder,
        sentences=SENTENCES,
        statistics=STATISTICS,
        family=family,
        cameras=("top", "wrist"),
        sizes=SMALL,
        image_size=32,
        chunk_size=4,
        state_dim=3,
        action_dim=2,
        max_state_dim=5,
        tokenizer_max_length=90 if family == "pi05" else 24,
    )


@pytest.fixture(scope="session", params=["pi0", "pi05"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pi0") / "policy", request.param)


@pytest.fixture(scope="session")
def checkpoint(built: Path) -> Pi0Files:
    return check_pi0(built)


@pytest.fixture(scope="session")
def pi0_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pi0") / "policy", "pi0")


@pytest.fixture(scope="session")
def pi05_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pi05") / "policy", "pi05")


@pytest.fixture
def folder(pi0_folder: Path, tmp_path: Path) -> Path:
    """A copy of pi0 to be damaged."""
    return Path(shutil.copytree(pi0_folder, tmp_path / "policy"))


@pytest.fixture
def newer(pi05_folder: Path, tmp_path: Path) -> Path:
    """A copy of pi0.5 to be damaged."""
    return Path(shutil.copytree(pi05_folder, tmp_path / "newer"))


NEW_KEYS = {
    "use_relative_actions": False,
    "relative_exclude_joints": ["gripper"],
    "action_feature_names": ["x", "gripper"],
    "pretrained_revision": None,
}


def to_lerobot_06(folder: Path) -> Path:
    """Give a folder the settings and steps that LeRobot 0.6.1 writes."""

    def insert(pipeline: dict[str, Any], name: str, config: dict[str, Any], *, after: int) -> None:
        steps = pipeline["steps"]
        place = next(i for i, step in enumerate(steps) if "state_file" in step)
        steps.insert(place + after, {"registry_name": name, "config": config})
        if not after:
            old, new = steps[place + 1]["state_file"], f"policy_preprocessor_step_{place + 1}_normalizer.safetensors"
            steps[place + 1]["state_file"] = new
            (folder / old).rename(folder / new)

    relative = {"enabled": False, "exclude_joints": ["gripper"], "action_names": ["x", "gripper"]}
    before, after = folder / "policy_preprocessor.json", folder / "policy_postprocessor.json"
    edit(before, lambda c: insert(c, "relative_actions_processor", relative, after=0))
    edit(after, lambda c: insert(c, "absolute_actions_processor", {"enabled": False}, after=1))
    edit(folder / "config.json", lambda c: c.update(NEW_KEYS))
    return folder


@pytest.fixture(params=["pi0", "pi05"])
def lerobot_06(request: pytest.FixtureRequest, pi0_folder: Path, pi05_folder: Path, tmp_path: Path) -> Path:
    """A folder in the layout of LeRobot 0.6.1."""
    source = pi0_folder if request.param == "pi0" else pi05_folder
    return to_lerobot_06(Path(shutil.copytree(source, tmp_path / "lerobot_06")))

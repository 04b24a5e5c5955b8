"""Tiny SmolVLA folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlvla.models.smolvla.checkpoint import SmolVLAFiles, check_smolvla
from rlvla.models.smolvla.tiny import TinyVlm, build_tiny_smolvla

SMALL = TinyVlm(image_size=32, patch_size=8, vision_dim=32, vision_depth=1, dim=64, layers=3)
STATISTICS = {
    "observation.state": {"mean": [0.1, 0.2, 0.3], "std": [1.0, 2.0, 3.0]},
    "action": {"mean": [0.5, -0.5], "std": [0.1, 0.2]},
}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_smolvla(
        tmp_path_factory.mktemp("smolvla") / "policy",
        sentences=["pick up the cube", "open the drawer"],
        statistics=STATISTICS,
        cameras=("top", "wrist"),
        vlm=SMALL,
        chunk_size=4,
        state_dim=3,
        action_dim=2,
    )


@pytest.fixture(scope="session")
def checkpoint(built: Path) -> SmolVLAFiles:
    return check_smolvla(built)


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(built, tmp_path / "policy"))

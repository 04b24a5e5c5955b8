"""Folders that LeRobot wrote, and what LeRobot computed with them (benchmarks/lerobot_agreement.py --family pi0)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlvla.models.pi0.checkpoint import HEAD, check_pi0
from tests.support.lerobot_cases import differences
from tests.support.pi0_cases import CASES, VECTORS, computed_like, recorded_folder


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_lerobot(name: str, tmp_path: Path) -> None:
    theirs = dict(np.load(VECTORS / name / "outputs.npz"))
    ours = computed_like(check_pi0(recorded_folder(name, tmp_path / "policy")), CASES[name], theirs)
    ours["images"] = ours["images"][:1, ..., ::3, ::3]
    gaps = differences(ours, theirs)
    assert set(theirs) == set(gaps)
    assert max(gaps.values()) < 1e-4, gaps


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_a_folder_of_lerobot_is_written_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    source = recorded_folder(name, tmp_path / "policy")
    checkpoint = check_pi0(source)
    assert HEAD in checkpoint.folder.shapes
    checkpoint.save(tmp_path / "copy", checkpoint.load_network().state_dict())
    files = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    assert len(files) > 8
    assert files == sorted(str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*") if p.is_file())
    for file in files:
        assert (source / file).read_bytes() == (tmp_path / "copy" / file).read_bytes(), file

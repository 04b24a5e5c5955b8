"""Folders that LeRobot wrote, and its outputs for them (benchmarks/lerobot_agreement.py --record)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlvla.models.smolvla.checkpoint import check_smolvla
from tests.support.lerobot_cases import differences
from tests.support.smolvla_cases import CASES, VECTORS, computed_like, recorded_folder


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_lerobot(name: str, tmp_path: Path) -> None:
    theirs = dict(np.load(VECTORS / name / "outputs.npz"))
    checkpoint = check_smolvla(recorded_folder(name, tmp_path / "policy"))
    ours = computed_like(checkpoint, CASES[name], theirs)
    ours["images"] = ours["images"][:1, ..., ::3, ::3]
    gaps = differences(ours, theirs)
    assert set(theirs) == set(gaps)
    assert max(gaps.values()) < 1e-4, gaps


def test_a_folder_of_lerobot_is_written_back_byte_for_byte(tmp_path: Path) -> None:
    source = recorded_folder("cross", tmp_path / "policy")
    checkpoint = check_smolvla(source)
    checkpoint.save(tmp_path / "copy", checkpoint.load_network().state_dict())
    files = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    assert len(files) > 8
    assert files == sorted(str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*") if p.is_file())
    for name in files:
        assert (source / name).read_bytes() == (tmp_path / "copy" / name).read_bytes(), name

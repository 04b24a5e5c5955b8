"""Folders that LeRobot wrote, and its outputs for them (benchmarks/lerobot_agreement.py --family pi0)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlvla.models.lerobot.folder import WEIGHTS_FILE
from rlvla.models.pi0.checkpoint import HEAD, check_pi0
from tests.support.lerobot_cases import differences
from tests.support.pi0_cases import CASES, VECTORS, VECTORS_06, computed_like, recorded_folder


@pytest.mark.parametrize("vectors", [VECTORS, VECTORS_06], ids=["0.4.4", "0.6.1"])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_lerobot(name: str, vectors: Path, tmp_path: Path) -> None:
    theirs = dict(np.load(vectors / name / "outputs.npz"))
    ours = computed_like(check_pi0(recorded_folder(name, tmp_path / "policy", vectors)), CASES[name], theirs)
    ours["images"] = ours["images"][:1, ..., ::3, ::3]
    gaps = differences(ours, theirs)
    assert set(theirs) == set(gaps)
    assert max(gaps.values()) < 1e-4, gaps


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_a_folder_of_lerobot_is_written_back(name: str, tmp_path: Path) -> None:
    """Byte for byte but for the weights, whose file has its metadata in no particular order."""
    source, copy = recorded_folder(name, tmp_path / "policy"), tmp_path / "copy"
    checkpoint = check_pi0(source)
    assert HEAD in checkpoint.folder.shapes and len(checkpoint.folder.metadata) == 2
    checkpoint.save(copy, checkpoint.load_network().state_dict())
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    assert len(files) > 8
    assert files == sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file())
    for file in files:
        if file.name == WEIGHTS_FILE:
            again = check_pi0(copy).folder
            assert (again.metadata, again.dtypes) == (checkpoint.folder.metadata, checkpoint.folder.dtypes)
            before, after = (load_file(path / file) for path in (source, copy))
            assert all(torch.equal(after[tensor], before[tensor]) for tensor in before)
        else:
            assert (source / file).read_bytes() == (copy / file).read_bytes(), file

"""Training in bfloat16 on two ranks, resumed once, beside float32: `benchmarks/bf16_training.py` with tiny policies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.bf16_training import PRECISIONS, SIZES, agree, curve, start, train
from rlvla.utils.files import read_metrics

SIZE = replace(SIZES["tiny"], iterations=4)
WEIGHTS = "model.safetensors"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize("policy", ["openvla"])
def test_bf16_learns_what_float32_does(policy: str, tmp_path: Path) -> None:
    """The success of both agrees, and both have moved the weights in one direction, by as much."""
    before = load_file(start(policy, SIZE, tmp_path) / WEIGHTS)
    runs = {precision: train(policy, precision, SIZE, tmp_path, seed=0) for precision in PRECISIONS}
    for run in runs.values():
        assert [record["step"] for record in read_metrics(run) if "rollout/episodes" in record] == [1, 2, 3, 4]
    assert agree(curve(runs["float32"]), curve(runs["bf16"]), SIZE)
    single, half = (moved(before, load_file(run / "policy" / WEIGHTS)) for run in runs.values())
    assert 0.8 < float(half.norm() / single.norm()) < 1.25
    assert torch.cosine_similarity(single, half, dim=0) > 0.4, "0.7 to 0.8 after six iterations"


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> torch.Tensor:
    """The change of all weights as one vector."""
    return torch.cat([(after[name].double() - before[name].double()).flatten() for name in before])

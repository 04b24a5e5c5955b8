"""Each objective of flow-matching policies trains toy_reach for two iterations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.train_ppo_vla import main as train
from rlvla.models.families import check_checkpoint
from rlvla.utils.files import read_metrics
from tests.support.flow_folders import QUICK, write_flow

WEIGHTS = "model.safetensors"
GAE = ["--advantage_estimator", "gae", "--n_samples_per_prompt", "1", "--rollout_batch_size", "8", "--share_backbone"]
OBJECTIVES = {
    "dppo": ["--policy_loss", "dppo", "--flow_noisy_steps", "all", "--denoising_clip", "0.01", "0.1"],
    "dppo with a critic": ["--policy_loss", "dppo", "--flow_noisy_steps", "all", *GAE],
    "fpo": ["--policy_loss", "fpo", "--flow_method", "ode"],
}


def run(start: Path, folder: Path, *flags: str) -> tuple[list[dict], float]:
    """The metrics of the iterations, and how far the weights have moved."""
    train(["--pretrain", str(start), "--save_path", str(folder), *QUICK, *flags])
    records = [record for record in read_metrics(folder) if "actor/pg_loss" in record]
    for record in records:
        assert not [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
    before, after = (load_file(place / WEIGHTS) for place in (start, folder / "policy"))
    assert before.keys() == after.keys()
    return records, max(float((after[name] - before[name]).abs().max()) for name in before)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_trains(name: str, tmp_path: Path) -> None:
    start = write_flow(tmp_path / "start")
    records, moved = run(start, tmp_path / "run", *OBJECTIVES[name])
    assert len(records) == 2 and moved > 1e-3
    assert any(record["actor/ppo_kl"] != 0 for record in records), "later steps see a policy that has moved"
    policy = check_checkpoint(tmp_path / "run" / "policy")
    assert policy.spec.columns == 4, "what a run needs is not left in its policy"
    assert torch.tensor([record["actor/pg_clipfrac"] for record in records]).le(1).all()

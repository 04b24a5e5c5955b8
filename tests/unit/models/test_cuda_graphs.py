"""Decisions as CUDA graphs, as far as a CPU can tell; `tests/gpu/test_policies.py` records and replays them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import full_size
from rlvla.models.actor import Actor
from rlvla.models.cuda_graphs import DecisionGraphs, first_rows, padded_batch
from rlvla.models.distributions import PolicyOutput

LEROBOT = {"platform": "libero", "cameras": ("agentview", "wrist"), "camera_map": ("agentview=image", "wrist=image2")}


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("family", ["openvla", "smolvla", "pi0"])
def test_a_decision_does_not_wait_for_the_device(family: str, greedy: bool, tmp_path: Path) -> None:
    """What waits for a device cannot be recorded; on the meta device, which has no numbers, it is an error."""
    folder = getattr(full_size, family)(tmp_path / "policy", tiny=True)
    policy = Actor.from_pretrained(folder, **({} if family == "openvla" else LEROBOT)).eval()
    spec, generator = policy.spec, np.random.default_rng(0)
    images = torch.zeros((2, spec.cameras, 64, 64, 3), dtype=torch.uint8)
    proprio = torch.zeros(2, spec.proprio_dim) if spec.proprio_dim else None
    inputs = policy.observations(images, proprio, ["pick up the bowl"] * 2)
    drawn = torch.from_numpy(np.stack([spec.draw(generator) for _ in range(2)]))
    inputs["noise"] = drawn if not greedy or spec.greedy_noise else None
    policy.to("meta")
    inputs = {name: None if value is None else value.to("meta") for name, value in inputs.items()}
    output = policy._decide(inputs, temperature=1.0, greedy=greedy and spec.greedy_noise)
    assert output.log_probs.shape == (2, spec.columns)


def test_padding_repeats_the_last_row_and_is_cut_off() -> None:
    inputs = {"state": torch.arange(6.0).view(3, 2), "noise": None}
    padded = padded_batch(inputs, 4)
    assert padded["noise"] is None
    assert torch.equal(padded["state"], torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [4.0, 5.0]]))
    assert padded_batch(inputs, 3)["state"] is inputs["state"]
    output = first_rows(PolicyOutput(None, padded["state"], {"tokens": padded["state"]}), 3)
    assert torch.equal(output.log_probs, inputs["state"]) and torch.equal(output.trace["tokens"], inputs["state"])


def test_a_policy_on_a_cpu_has_no_graphs(policy_folder: Path) -> None:
    policy = Actor.from_pretrained(policy_folder)
    with pytest.raises(ValueError, match="CUDA GPU; this one is on cpu"):
        policy.use_cuda_graphs()


def test_a_copied_policy_records_its_own(policy_folder: Path) -> None:
    policy = Actor.from_pretrained(policy_folder)
    policy._graphs = DecisionGraphs(policy)
    again = copy.deepcopy(policy)
    assert again._graphs is not policy._graphs and again._graphs._policy is again


def test_observations_that_are_not_tensors_are_decided_without(caplog: pytest.LogCaptureFixture) -> None:
    graphs = DecisionGraphs(torch.nn.Linear(1, 1))
    output = PolicyOutput(None, torch.zeros(1, 1), {})
    assert graphs(lambda _: output, {"sentences": object(), "noise": None}, ()) is output
    assert not graphs._usable

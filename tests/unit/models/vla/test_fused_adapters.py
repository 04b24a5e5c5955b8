"""Adapters as two kernels, as computed on a GPU, against those of peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlvla.models.actor import Actor, ActorConfig

ADAPTERS = ActorConfig(lora_rank=4, lora_alpha=6, lora_targets=("all-linear",))


def adapted(policy_folder: Path) -> torch.nn.Module:
    policy = Actor.from_pretrained(policy_folder, ADAPTERS)
    return next(module for module in policy.modules() if type(module).__name__ == "FusedLoraLinear")


def test_outputs_and_gradients_are_those_of_peft(policy_folder: Path) -> None:
    torch.manual_seed(0)
    layer = adapted(policy_folder)
    for parameter in layer.lora_B.parameters():
        parameter.data.normal_()
    weights = [*layer.lora_A.parameters(), *layer.lora_B.parameters()]
    rows = torch.randn(2, 3, layer.in_features, requires_grad=True)
    assert layer.can_fuse(rows)
    results = []
    for compute in (layer, layer.fused):
        output = compute(rows)
        results.append((output, *torch.autograd.grad(output.square().sum(), [rows, *weights])))
    for theirs, ours in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["dtype", "dropout", "sharded"])
def test_peft_computes_where_the_kernels_do_not_fit(case: str, policy_folder: Path) -> None:
    layer = adapted(policy_folder)
    rows = torch.randn(2, layer.in_features, dtype=torch.bfloat16 if case == "dtype" else torch.float32)
    if case == "dropout":
        layer.lora_dropout["default"] = torch.nn.Dropout(0.5)
        assert layer.eval().can_fuse(rows)
        layer.train()
    elif case == "sharded":
        layer.lora_B["default"].weight.ds_id = 1  # as ZeRO-3 marks a parameter
    assert not layer.can_fuse(rows)

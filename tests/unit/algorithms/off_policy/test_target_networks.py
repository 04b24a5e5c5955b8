"""Polyak averages of networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlvla.algorithms.off_policy import update_target


def network(seed: int, width: int = 3) -> nn.Module:
    """With parameters, a floating-point and an integer buffer."""
    torch.manual_seed(seed)
    found = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
    found(torch.randn(8, 2))
    return found


def copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def test_parameters_are_averaged_and_buffers_copied() -> None:
    target, source = network(0), network(1)
    source(torch.randn(8, 2))
    before, wanted = copies(target), copies(source)
    gradient = next(target.parameters()).requires_grad
    update_target(target, source, 0.25)
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for name, tensor in target.state_dict().items():
        if name in buffers:
            assert torch.equal(tensor, wanted[name])
        else:
            torch.testing.assert_close(tensor, 0.75 * before[name] + 0.25 * wanted[name])
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in source.state_dict().items())
    assert next(target.parameters()).requires_grad == gradient and next(target.parameters()).grad_fn is None


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_the_ends_are_exact(tau: float) -> None:
    target, source = network(0), network(1)
    parameters = dict(target.named_parameters())
    wanted = copies(source if tau else target)
    update_target(target, source, tau)
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in parameters.items())


def test_many_steps_approach_the_source_geometrically() -> None:
    target, source = network(0).double(), network(1).double()
    distance = target[0].weight.detach() - source[0].weight.detach()
    for _ in range(50):
        update_target(target, source, 0.01)
    torch.testing.assert_close(target[0].weight.detach() - source[0].weight.detach(), distance * 0.99**50)


def test_a_source_in_half_precision_is_averaged_in_float32() -> None:
    target, source = network(0), network(1)
    half = source.to(torch.bfloat16)
    before = target[0].weight.detach().clone()
    update_target(target, half, 1e-3)
    torch.testing.assert_close(target[0].weight.detach(), before + 1e-3 * (half[0].weight.float().detach() - before))


@pytest.mark.parametrize(
    ("target", "source", "tau", "named"),
    [
        (network(0), network(1, 4), 0.5, r"0.weight has shape \[3, 2\]"),
        (network(0), network(1)[0], 0.5, "different networks: only one has"),
        (network(0).to(torch.bfloat16), network(1), 0.5, "0.weight of the target network is torch.bfloat16"),
        (network(0), network(1), 1.5, "tau must lie in"),
    ],
)
def test_a_mismatch_changes_nothing(target: nn.Module, source: nn.Module, tau: float, named: str) -> None:
    before = copies(target)
    with pytest.raises(ValueError, match=named):
        update_target(target, source, tau)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())

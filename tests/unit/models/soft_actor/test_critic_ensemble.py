"""The ensemble of critics against separate networks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlvla.models.soft_actor.network import CriticEnsemble

M, F, SIZES = 3, 5, (7, 6)


def ensemble(seed: int = 0, **options) -> CriticEnsemble:
    """With scales and shifts of the layer norms that are not 1 and 0."""
    critics = CriticEnsemble(F, SIZES, M, generator=torch.Generator().manual_seed(seed), **options).double()
    torch.manual_seed(seed)
    with torch.no_grad():
        for norm in critics.norms:
            norm.weight.normal_()
            norm.bias.normal_()
    return critics


def separate(whole: CriticEnsemble, member: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(zip((F, *SIZES), (*SIZES, 1))):
        linear = nn.Linear(inputs, outputs, dtype=torch.float64)
        linear.weight.data = whole.linears[number].weight[member].detach().T.clone()
        linear.bias.data = whole.linears[number].bias[member, 0].detach().clone()
        layers.append(linear)
        if number < len(SIZES):
            norm = nn.LayerNorm(outputs, dtype=torch.float64)
            norm.weight.data = whole.norms[number].weight[member, 0].detach().clone()
            norm.bias.data = whole.norms[number].bias[member, 0].detach().clone()
            layers += [norm, nn.ReLU()]
    return nn.Sequential(*layers)


def test_it_is_separate_networks() -> None:
    """Values, and gradients of weights and inputs."""
    whole = ensemble()
    inputs = torch.randn(4, 2, F, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(M, 4, 2, dtype=torch.float64)
    values = whole(inputs)
    assert values.shape == (M, 4, 2)
    (values * factors).sum().backward()
    gradient = torch.zeros_like(inputs)
    for member in range(M):
        single, x = separate(whole, member), inputs.detach().clone().requires_grad_()
        expected = single(x)[..., 0]
        torch.testing.assert_close(values[member], expected)
        (expected * factors[member]).sum().backward()
        gradient += x.grad
        for number, linear in enumerate(whole.linears):
            torch.testing.assert_close(linear.weight.grad[member].T, single[3 * number].weight.grad)
            torch.testing.assert_close(linear.bias.grad[member, 0], single[3 * number].bias.grad)
        for number, norm in enumerate(whole.norms):
            torch.testing.assert_close(norm.weight.grad[member, 0], single[3 * number + 1].weight.grad)
            torch.testing.assert_close(norm.bias.grad[member, 0], single[3 * number + 1].bias.grad)
    torch.testing.assert_close(inputs.grad, gradient)


def test_some_critics_are_evaluated_alone() -> None:
    whole, inputs = ensemble(), torch.randn(4, F, dtype=torch.float64)
    torch.testing.assert_close(whole(inputs, torch.tensor([2, 0])), whole(inputs)[[2, 0]])
    whole(inputs, torch.tensor([2, 0])).sum().backward()
    assert not whole.linears[1].weight.grad[1].any() and whole.linears[1].weight.grad[0].any()


@pytest.mark.parametrize("init", ["default", "orthogonal"])
def test_each_critic_draws_different_weights(init: str) -> None:
    critics = CriticEnsemble(F, (64, 64), M, init=init, generator=torch.Generator().manual_seed(0))
    again = CriticEnsemble(F, (64, 64), M, init=init, generator=torch.Generator().manual_seed(0))
    for linear, same in zip(critics.linears, again.linears):
        assert torch.equal(linear.weight, same.weight) and torch.equal(linear.bias, same.bias)
        assert linear.weight.dtype == torch.float32
        assert not torch.equal(linear.weight[0], linear.weight[1])
        assert linear.weight.isfinite().all() and linear.bias.isfinite().all()
    for number, linear in enumerate(critics.linears):
        if init == "orthogonal":
            gain = 2.0 if number < 2 else 1.0
            for weight in linear.weight:
                narrow = weight if weight.shape[0] <= weight.shape[1] else weight.T
                torch.testing.assert_close(narrow @ narrow.T, gain * torch.eye(len(narrow)), atol=1e-5, rtol=0)
            assert not linear.bias.any()
        else:
            bound = linear.weight.shape[1] ** -0.5
            assert linear.weight.abs().max() <= bound and linear.bias.abs().max() <= bound
            assert float(linear.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_values_are_float32_also_under_autocast() -> None:
    critics = CriticEnsemble(F, SIZES, M)
    inputs = torch.randn(4, F)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(critics(inputs), critics.forward(inputs.double()))
        assert critics(inputs.bfloat16()).dtype == torch.float32
    values = critics(inputs)
    assert values.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(critics(inputs), values)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"input_dim": 0}, "must be positive"),
        ({"hidden_sizes": (4, 0)}, "must be positive"),
        ({"n_critics": 0}, "0 critics must be positive"),
        ({"init": "zeros"}, "unknown initialisation 'zeros'; known: default, orthogonal"),
    ],
)
def test_arguments_are_checked(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CriticEnsemble(**{"input_dim": F} | options)

"""The tanh of a normal variable, against decimals, quadrature and samples."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from rlvla.algorithms.off_policy import (
    log_one_minus_tanh_squared,
    tanh_normal_entropy,
    tanh_normal_log_prob,
    tanh_normal_sample,
)
from rlvla.algorithms.off_policy.tanh_normal import LOG_STD_RANGE

MASK = torch.tensor([[True, True, False], [True, False, False]])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow_log_derivative(u: float) -> float:
    """-2 log cosh u with 60 digits."""
    with localcontext() as context:
        context.prec = 60
        x = Decimal(u)
        return float(-2 * ((x.exp() + (-x).exp()) / 2).ln())


def slow_log_prob(action: float, mean: float, log_std: float) -> float:
    std = math.exp(log_std)
    normal = -((math.atanh(action) - mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))
    return normal - math.log(1 - action**2)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_the_derivative_is_exact_where_tanh_is_one(dtype: torch.dtype, rtol: float) -> None:
    points = [-80.0, -19.0, -9.5, -3.0, -0.5, 0.5, 3.0, 9.5, 10.5, 19.0, 80.0]
    u = torch.tensor(points, dtype=dtype, requires_grad=True)
    found = log_one_minus_tanh_squared(u)
    wanted = torch.tensor([slow_log_derivative(p) for p in points], dtype=dtype)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=0)
    found.sum().backward()
    torch.testing.assert_close(u.grad, -2 * torch.tanh(u.detach()))


def test_the_density_of_a_sample_is_that_of_its_action() -> None:
    mean, log_std, noise = draw(4, 3), 0.3 * draw(4, 3, seed=1), draw(4, 3, seed=2)
    actions, log_probs = tanh_normal_sample(mean, log_std, noise)
    torch.testing.assert_close(actions, torch.tanh(mean + log_std.exp() * noise))
    wanted = [slow_log_prob(*map(float, x)) for x in zip(actions.flatten(), mean.flatten(), log_std.flatten())]
    torch.testing.assert_close(log_probs.flatten(), torch.tensor(wanted, dtype=torch.float64))
    torch.testing.assert_close(tanh_normal_log_prob(actions, mean, log_std), log_probs)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -1.0), (0.7, -0.3), (-1.5, -2.0), (0.2, 0.0)])
def test_the_density_integrates_to_one(mean: float, log_std: float) -> None:
    """By midpoints, and by uniform samples."""
    parameters = [torch.tensor([x], dtype=torch.float64) for x in (mean, log_std)]

    def density(actions: Tensor) -> Tensor:
        return tanh_normal_log_prob(actions[:, None], *(p.expand(len(actions), 1) for p in parameters)).exp()[:, 0]

    n = 200_000
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) * 2 / n - 1
    assert float(density(grid).mean() * 2) == pytest.approx(1, abs=1e-5)
    uniform = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    estimates = density(uniform) * 2
    assert float(estimates.mean()) == pytest.approx(1, abs=5 * float(estimates.std()) / math.sqrt(n))


def test_actions_near_and_beyond_the_bounds_have_a_finite_density() -> None:
    largest = 1 - 2**-24
    actions = torch.tensor([1.0, -1.0, 1.5, largest])
    log_probs = tanh_normal_log_prob(actions, torch.zeros(4), torch.zeros(4))
    assert log_probs.tolist() == pytest.approx([slow_log_prob(largest, 0, 0)] * 4, rel=1e-5)
    mean = torch.tensor([-40.0, 40.0], requires_grad=True)
    samples, log_probs = tanh_normal_sample(mean, torch.zeros(2), torch.zeros(2))
    assert samples.tolist() == [-1, 1]
    assert log_probs.tolist() == pytest.approx([2 * (40 - math.log(2)) - math.log(2 * math.pi) / 2] * 2)
    log_probs.sum().backward()
    assert mean.grad.tolist() == [-2, 2]


def test_the_standard_deviation_is_bounded() -> None:
    """Also where a float32 could not tell the sample from the mean."""
    log_std = torch.tensor([-50.0, 9.0], requires_grad=True)
    noise = torch.tensor([1.5, 0.25])
    actions, log_probs = tanh_normal_sample(torch.tensor([0.3, 0.3]), log_std, noise)
    u = [0.3 + math.exp(bound) * z for bound, z in zip(LOG_STD_RANGE, noise.tolist())]
    assert LOG_STD_RANGE == (-20, 2) and actions.tolist() == pytest.approx([math.tanh(x) for x in u])
    wanted = [
        -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - bound - slow_log_derivative(x)
        for bound, z, x in zip(LOG_STD_RANGE, noise.tolist(), u)
    ]
    assert log_probs.tolist() == pytest.approx(wanted, abs=1e-5)
    log_probs.sum().backward()
    assert log_std.grad.tolist() == [0, 0]


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_gradients_are_those_of_finite_differences(mask: Tensor | None) -> None:
    mean, log_std, noise = draw(4, 2, 3).requires_grad_(), (0.4 * draw(2, 3, seed=1)).requires_grad_(), draw(4, 2, 3)
    assert gradcheck(lambda m, s: tanh_normal_sample(m, s, noise, mask), (mean, log_std))
    actions = torch.tanh(draw(4, 2, 3, seed=3)).requires_grad_()
    assert gradcheck(lambda a, m, s: tanh_normal_log_prob(a, m, s, mask), (actions, mean, log_std))
    many = draw(2, 4, 2, 3, seed=4)
    assert gradcheck(lambda m, s: tanh_normal_entropy(m, s, many, mask), (mean, log_std))


def test_unused_elements_are_zero_whatever_they_hold() -> None:
    mean, log_std, noise = draw(4, 2, 3), 0.4 * draw(4, 2, 3, seed=1), draw(4, 2, 3, seed=2)
    actions = torch.tanh(draw(4, 2, 3, seed=3))
    clean = (*tanh_normal_sample(mean, log_std, noise), tanh_normal_log_prob(actions, mean, log_std))
    clean = (*clean, tanh_normal_entropy(mean, log_std, noise[None]))
    poisoned = [x.masked_fill(~MASK, math.nan).requires_grad_() for x in (mean, log_std, noise, actions)]
    mean, log_std, noise, actions = poisoned
    dirty = (*tanh_normal_sample(mean, log_std, noise, MASK), tanh_normal_log_prob(actions, mean, log_std, MASK))
    dirty = (*dirty, tanh_normal_entropy(mean, log_std, noise[None], MASK))
    for found, wanted in zip(dirty, clean):
        torch.testing.assert_close(found, wanted.where(MASK, 0.0), rtol=1e-12, atol=1e-12)
        assert not found[~MASK.expand_as(found)].any()
    sum(x.sum() for x in dirty).backward()
    for x in (mean, log_std, actions):
        assert not x.grad[~MASK.expand_as(x)].any() and x.grad[MASK.expand_as(x)].all()


def test_the_entropy_is_minus_the_mean_log_prob_with_less_variance() -> None:
    mean, log_std = draw(3), 0.2 * draw(3, seed=1) - 1.5
    noise = draw(20_000, 3, seed=2)
    _, log_probs = tanh_normal_sample(mean.expand(20_000, 3), log_std, noise)
    single = tanh_normal_entropy(mean.expand(20_000, 3), log_std, noise[None])
    error = log_probs.std(0) / math.sqrt(len(noise))
    found = tanh_normal_entropy(mean, log_std, noise)
    assert ((found + log_probs.mean(0)).abs() < 5 * error).all()
    torch.testing.assert_close(single.mean(0), found)
    assert (single.std(0) < 0.8 * log_probs.std(0)).all()


def test_half_precision_is_computed_in_float32() -> None:
    mean = torch.tensor([0.3], dtype=torch.bfloat16)
    actions, log_probs = tanh_normal_sample(mean, torch.zeros(1, dtype=torch.bfloat16), torch.ones(1))
    assert actions.dtype == log_probs.dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"noise": torch.zeros(4, 1)}, r"noise has shape \[4, 1\]"),
        ({"log_std": torch.zeros(2)}, r"log_std has shape \[2\]"),
        ({"mask": torch.ones(2, 4, 3, dtype=torch.bool)}, r"mask has shape \[2, 4, 3\]"),
        ({"mask": torch.ones(4, 3)}, "mask must be a bool tensor"),
    ],
)
def test_arguments_are_checked(given: dict, named: str) -> None:
    valid = {"mean": torch.zeros(4, 3), "log_std": torch.zeros(3), "noise": torch.zeros(4, 3)}
    with pytest.raises(ValueError, match=named):
        tanh_normal_sample(**valid | given)

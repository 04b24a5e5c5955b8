"""The Gaussian over action chunks, against torch's and against estimates from samples."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from rlvla.models.distributions import GaussianDistribution

B, A, D = 4, 3, 2


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def drawn(seed: int, temperature: float = 1.0, shape: tuple[int, ...] = (D,)) -> GaussianDistribution:
    g = torch.Generator().manual_seed(seed)
    mean, log_std = torch.randn(B, A, D, generator=g), torch.randn(shape, generator=g) * 0.5 - 1.0
    return GaussianDistribution(mean, log_std, temperature)


@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("shape", [(D,), (B, A, D)])
def test_numbers_are_those_of_torch(shape: tuple[int, ...], temperature: float) -> None:
    ours, other = drawn(0, temperature, shape), drawn(1)
    stock = Normal(ours.mean, ours.std)
    output = ours.sample(torch.randn(B, A, D))
    torch.testing.assert_close(output.log_probs, stock.log_prob(output.actions).reshape(B, A * D))
    torch.testing.assert_close(ours.entropy(), stock.entropy().reshape(B, A * D))
    torch.testing.assert_close(
        ours.kl(other.parameters()),
        kl_divergence(stock, Normal(other.mean, other.std)).reshape(B, A * D),
        rtol=1e-4,
        atol=1e-5,
    )
    torch.testing.assert_close(ours.kl(ours.parameters()), torch.zeros(B, A * D))


def test_entropy_and_kl_agree_with_samples() -> None:
    ours, other = drawn(0, 1.3), drawn(1)
    n = 20000
    many = GaussianDistribution(ours.mean.repeat(n, 1, 1), ours.log_std.repeat(n, 1, 1))
    g = torch.Generator().manual_seed(7)
    output = many.sample(torch.randn(many.mean.shape, generator=g))
    against = GaussianDistribution(other.mean.repeat(n, 1, 1), other.log_std.repeat(n, 1, 1)).log_prob(output.trace)
    for samples, exact in (
        (-output.log_probs, ours.entropy()),
        (output.log_probs - against, ours.kl(other.parameters())),
    ):
        samples = samples.view(n, B, A * D)
        error = samples.std(0) / math.sqrt(n)
        assert ((samples.mean(0) - exact).abs() < 5 * error + 1e-5).all()


def test_columns_are_in_the_order_action_dimension() -> None:
    ours = drawn(0)
    actions = ours.mean.clone()
    actions[:, 2, 1] += 10.0  # the last action's last dimension
    low = ours.log_prob({"actions": actions}) < ours.log_prob({"actions": ours.mean}) - 1.0
    assert low.nonzero()[:, 1].tolist() == [2 * D + 1] * B


def test_a_stored_trace_is_scored_as_at_sampling_to_the_bit() -> None:
    for temperature in (1.0, 1.6):
        ours = drawn(3, temperature)
        output = ours.sample(torch.randn(B, A, D))
        assert torch.equal(ours.log_prob(output.trace), output.log_probs)
        assert torch.equal(GaussianDistribution(**ours.parameters()).log_prob(output.trace), output.log_probs)


def test_greedy_is_the_mean_and_temperature_widens() -> None:
    ours, wide = drawn(0), drawn(0, 2.0)
    assert torch.equal(ours.sample().actions, ours.mean)
    torch.testing.assert_close(wide.std, 2.0 * ours.std)
    noise = torch.randn(B, A, D)
    torch.testing.assert_close(wide.sample(noise).actions - ours.mean, 2.0 * (ours.sample(noise).actions - ours.mean))
    with pytest.raises(ValueError, match="temperature is 0.0"):
        drawn(0, 0.0)


def test_gradients_pass_through_rsample_and_not_through_sample() -> None:
    mean, log_std = torch.zeros(B, A, D, requires_grad=True), torch.zeros(D, requires_grad=True)
    noise = torch.randn(B, A, D)
    ours = GaussianDistribution(mean, log_std)
    assert not ours.sample(noise).log_probs.requires_grad
    ours.rsample(noise).sum().backward()
    torch.testing.assert_close(mean.grad, torch.ones(B, A, D))
    torch.testing.assert_close(log_std.grad, noise.sum((0, 1)))


def test_reduced_precision_is_computed_in_float32() -> None:
    ours = GaussianDistribution(torch.zeros(B, A, D).bfloat16(), torch.full((D,), -2.0).bfloat16())
    output = ours.sample(torch.randn(B, A, D))
    assert output.actions.dtype == output.log_probs.dtype == ours.entropy().dtype == torch.float32

"""Distributions of action tokens, against sums over all outcomes; Gaussians, against torch and estimates."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from rlvla.models.distributions import AutoregressiveTokens, GaussianDistribution, TokenDistribution, pick_tokens

B, K, V = 4, 3, 5


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def logits(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return 2 * torch.randn(B, K, V, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def uniforms(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((B, K)))


def every_outcome() -> list[torch.Tensor]:
    """Each of the V ** K decisions, for all rows."""
    return [torch.tensor(outcome).expand(B, K) for outcome in itertools.product(range(V), repeat=K)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_probabilities_of_all_decisions_add_up_to_one(temperature: float) -> None:
    ours = TokenDistribution(logits(0).double(), temperature)
    total = sum(ours.log_prob({"tokens": tokens}).sum(-1).exp() for tokens in every_outcome())
    torch.testing.assert_close(total, torch.ones(B, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_entropy_kl_and_squares_equal_sums_over_the_vocabulary(temperature: float) -> None:
    ours, other = (TokenDistribution(logits(seed).double(), temperature) for seed in (0, 1))
    computed = ours.entropy(), ours.kl(other.parameters()), ours.sum_pi_squared()
    for row, column in itertools.product(range(B), range(K)):
        weights = [[math.exp(x / temperature) for x in d._logits[row, column].tolist()] for d in (ours, other)]
        p, q = ([w / math.fsum(each) for w in each] for each in weights)
        expected = (
            -math.fsum(a * math.log(a) for a in p),
            math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q)),
            math.fsum(a * a for a in p),
        )
        assert [float(numbers[row, column]) for numbers in computed] == pytest.approx(expected, abs=1e-12)
    assert torch.equal(ours.kl(ours.parameters()), torch.zeros(B, K, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_scores_equal_log_probs_of_sampling_to_the_bit(temperature: float) -> None:
    ours = TokenDistribution(logits(2), temperature)
    for noise in (uniforms(), None):
        output = ours.sample(noise)
        assert output.trace["tokens"].dtype == torch.int64 and output.log_probs.dtype == torch.float32
        assert torch.equal(TokenDistribution(logits(2), temperature).log_prob(output.trace), output.log_probs)
    assert torch.equal(ours.sample(None).trace["tokens"], logits(2).argmax(-1)), "greedy at any temperature"


def test_a_token_is_drawn_where_the_cumulative_probability_passes_the_uniform() -> None:
    ours, noise = TokenDistribution(logits(3), 1.3), uniforms(1)
    tokens = ours.sample(noise).trace["tokens"]
    for row, column in itertools.product(range(B), range(K)):
        p = torch.softmax(logits(3)[row, column].double() / 1.3, -1).tolist()
        token = int(tokens[row, column])
        below = math.fsum(p[:token])
        assert below - 1e-6 <= float(noise[row, column]) <= below + p[token] + 1e-6


def test_gradients_of_log_prob_entropy_and_kl() -> None:
    table, other = logits(4).double().requires_grad_(), TokenDistribution(logits(5).double(), 1.0).parameters()
    trace = {"tokens": torch.randint(0, V, (B, K), generator=torch.Generator().manual_seed(0))}
    for quantity in (lambda d: d.log_prob(trace), lambda d: d.entropy(), lambda d: d.kl(other)):
        assert torch.autograd.gradcheck(lambda x, f=quantity: f(TokenDistribution(x, 1.6)), (table,))


def test_a_token_cannot_be_sampled_with_a_gradient() -> None:
    with pytest.raises(NotImplementedError, match="discrete"):
        TokenDistribution(logits(0), 1.0).rsample(uniforms())


# ------------------------------------------------------------------------- tokens one after the other
PREFIX = torch.randn(K, V + 1, V, generator=torch.Generator().manual_seed(9))


def next_logits(step: int, last: torch.Tensor | None) -> torch.Tensor:
    """[B, V]: a network whose logits depend on the token before, differently in every row."""
    before = torch.full((B,), V) if last is None else last
    return PREFIX[step][before] + 0.3 * logits(6)[:, step]


def chain(temperature: float) -> AutoregressiveTokens:
    def decode(choose):
        computed, last = [], None
        for step in range(K):
            computed.append(next_logits(step, last))
            last = choose(computed[-1], step)
        return torch.stack(computed, 1)

    def teacher_forced(tokens):
        return torch.stack([next_logits(k, None if k == 0 else tokens[:, k - 1]) for k in range(K)], 1)

    return AutoregressiveTokens(decode, teacher_forced, temperature)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_decisions_of_a_chain_add_up_to_one_and_are_scored_as_sampled(temperature: float) -> None:
    ours = chain(temperature)
    total = sum(ours.log_prob({"tokens": tokens}).double().sum(-1).exp() for tokens in every_outcome())
    torch.testing.assert_close(total, torch.ones(B, dtype=torch.float64), atol=1e-5, rtol=0)
    for noise in (uniforms(2), None):
        output = ours.sample(noise)
        assert torch.equal(ours.log_prob(output.trace), output.log_probs)
        last = None
        for step in range(K):
            drawn = None if noise is None else noise[:, step : step + 1]
            last = pick_tokens(next_logits(step, last)[:, None], temperature, drawn)[:, 0]
            assert torch.equal(output.trace["tokens"][:, step], last), "each token given the one before"


# ------------------------------------------------------------------------- Gaussians
A, D = 3, 2


def drawn(
    seed: int, temperature: float = 1.0, shape: tuple[int, ...] = (D,), correlation: float = 0.0
) -> GaussianDistribution:
    g = torch.Generator().manual_seed(seed)
    mean, log_std = torch.randn(B, A, D, generator=g), torch.randn(shape, generator=g) * 0.5 - 1.0
    return GaussianDistribution(mean, log_std, temperature, correlation)


def joint(gaussian: GaussianDistribution, correlation: float) -> MultivariateNormal:
    """The chunk of each dimension, [B, D] distributions over A numbers, with covariance std_i std_j rho**|i - j|."""
    std, lags = gaussian.std.transpose(1, 2), (torch.arange(A)[:, None] - torch.arange(A)).abs()
    covariance = std.unsqueeze(-1) * std.unsqueeze(-2) * correlation**lags
    return MultivariateNormal(gaussian.mean.transpose(1, 2), covariance)


def per_dimension(columns: torch.Tensor) -> torch.Tensor:
    """[B, D]: sums over the actions of a chunk."""
    return columns.view(B, A, D).sum(1)


@pytest.mark.parametrize("shape", [(D,), (B, A, D)])
def test_correlated_noise_is_a_multivariate_normal_over_the_chunk(shape: tuple[int, ...]) -> None:
    rho = 0.6
    ours, other = drawn(0, 1.3, shape, rho), drawn(1, 1.0, shape, rho)
    stock, against = joint(ours, rho), joint(other, rho)
    output = ours.sample(torch.randn(B, A, D))
    expected = stock.log_prob(output.actions.transpose(1, 2))
    torch.testing.assert_close(per_dimension(output.log_probs), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(per_dimension(ours.entropy()), stock.entropy(), rtol=1e-4, atol=1e-4)
    kl = per_dimension(ours.kl(other.parameters()))
    torch.testing.assert_close(kl, kl_divergence(stock, against), rtol=1e-3, atol=1e-4)
    assert torch.equal(ours.log_prob(output.trace), output.log_probs)
    torch.testing.assert_close(
        ours.marginals.log_prob(output.trace), Normal(ours.mean, ours.std).log_prob(output.actions).flatten(1)
    )


def test_samples_of_correlated_noise_have_its_covariance() -> None:
    n, rho = 40_000, 0.6
    ours = GaussianDistribution(torch.zeros(n, A, D), torch.tensor([-1.0, 0.0]), correlation=rho)
    noise = torch.randn(n, A, D, generator=torch.Generator().manual_seed(0))
    actions, covariance = ours.sample(noise).actions, joint(ours, rho).covariance_matrix[0]
    for dim, expected in enumerate(covariance):
        measured = torch.cov(actions[:, :, dim].T)
        torch.testing.assert_close(measured, expected, rtol=0.03, atol=0.01 * float(expected[0, 0]))


def test_later_actions_do_not_change_the_log_probs_of_earlier_ones() -> None:
    """An episode may end within a chunk."""
    ours = drawn(0, correlation=0.6)
    actions = ours.sample(torch.randn(B, A, D)).actions
    changed = actions.clone()
    changed[:, 2] = 9.0
    before, after = (ours.log_prob({"actions": a}).view(B, A, D) for a in (actions, changed))
    assert torch.equal(before[:, :2], after[:, :2]) and not torch.equal(before[:, 2], after[:, 2])


@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("shape", [(D,), (B, A, D)])
def test_gaussians_equal_those_of_torch(shape: tuple[int, ...], temperature: float) -> None:
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

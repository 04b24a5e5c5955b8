"""Chains: what was sampled is what is scored, and the score is the gradient's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlvla.algorithms.choices import FLOW_METHODS, FLOW_NOISY_STEPS
from rlvla.algorithms.flow import (
    FlowSampling,
    ScoredSteps,
    dppo_loss,
    learned_std,
    noisy_step_count,
    noisy_step_index,
    sample_chain,
    sample_ode,
    score_chain,
)
from tests.support.gaussian_flow import LEVEL, TARGET, coefficients, reference_moments, reward_derivative

ACTIONS, DIMS = 3, 4
LEARNED_STD = float(learned_std(torch.tensor(0.0)))
STD_SLOPE = LEARNED_STD * 0.5 * math.log(2.0)

every_method = pytest.mark.parametrize("method", FLOW_METHODS)
every_mode = pytest.mark.parametrize("noisy", FLOW_NOISY_STEPS)


class Network:
    """A small random velocity network in which every element depends on every other."""

    def __init__(self, method: str, dtype: torch.dtype = torch.float32):
        rng = torch.Generator().manual_seed(1)
        size = ACTIONS * DIMS
        self.weight = (torch.randn(size, size, generator=rng) / 3).to(dtype).requires_grad_()
        self.pair = method == "noise"
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, x: Tensor, t: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        self.calls.append(tuple(x.shape))
        assert t.shape == x.shape[:2]
        v = torch.tanh(x.flatten(2) @ self.weight + t[..., None]).view_as(x)
        return (v, learned_std(v)) if self.pair else v


def sampled(
    method: str, noisy: str, steps: int, batch: int, *, mask: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Network, FlowSampling, dict[str, Tensor], ScoredSteps]:
    rng = torch.Generator().manual_seed(batch)
    network, sampling = Network(method, dtype), FlowSampling(method, steps, noisy)
    one = noisy == "one"
    shape = (batch, ACTIONS, DIMS)
    x_1 = torch.randn(shape, generator=rng, dtype=dtype)
    noise = torch.randn(shape if one else (batch, steps, *shape[1:]), generator=rng, dtype=dtype)
    index = torch.randint(steps, (batch,), generator=rng) if one else None
    with torch.no_grad():
        trace, scored = sample_chain(network, x_1, noise, sampling, index=index, mask=mask)
    assert network.calls == [(batch, 1, ACTIONS, DIMS)] * steps
    network.calls.clear()
    return network, sampling, trace, scored


@every_method
@every_mode
@pytest.mark.parametrize("steps", [1, 4, 10])
def test_the_ratio_is_one_at_unchanged_weights(method: str, noisy: str, steps: int) -> None:
    for batch, dtype, tolerance in ((1, torch.float32, 1e-4), (7, torch.float32, 1e-4), (7, torch.float64, 1e-11)):
        network, sampling, trace, before = sampled(method, noisy, steps, batch, dtype=dtype)
        after = score_chain(network, trace, sampling)
        evaluations = 1 if noisy == "one" else steps
        assert network.calls == [(batch, evaluations, ACTIONS, DIMS)], "one pass of the network"
        assert after.log_probs.shape == (batch, evaluations, ACTIONS, DIMS)
        log_ratio = (after.joint_log_probs - before.joint_log_probs).sum((1, 2))
        torch.testing.assert_close(log_ratio, torch.zeros_like(log_ratio), atol=tolerance, rtol=0)
        random = method != "ode" and not (method == "cps" and steps == 1)
        assert bool(after.log_probs.any()) == random or (noisy == "one" and batch == 1), (
            "ratios of nothing prove nothing"
        )


@every_method
@every_mode
def test_the_trace_is_a_chain_of_its_steps(method: str, noisy: str) -> None:
    network, sampling, trace, scored = sampled(method, noisy, 4, 5)
    if noisy == "all":
        assert trace["chain"].shape == (5, 5, ACTIONS, DIMS)
        return
    x, rows = trace["after"], trace["index"]
    for i in range(4):  # the ODE from the noisy step to the end
        v = network(x.unsqueeze(1), torch.full((5, 1), 1 - i / 4))
        moved = x - (v[0] if isinstance(v, tuple) else v).squeeze(1) / 4
        x = torch.where((rows < i)[:, None, None], moved, x)
    torch.testing.assert_close(x, trace["x_0"])
    assert not torch.equal(scored.mean[:, 0], trace["after"]) or method == "ode"


@every_method
@every_mode
def test_scores_do_not_depend_on_the_micro_batch(method: str, noisy: str) -> None:
    network, sampling, trace, _ = sampled(method, noisy, 4, 6, dtype=torch.float64)
    whole = score_chain(network, trace, sampling).joint_log_probs
    if whole.requires_grad and method != "ode":
        (gradient,) = torch.autograd.grad(whole.sum(), network.weight)
        pieces = [score_chain(network, {k: v[a : a + 2] for k, v in trace.items()}, sampling) for a in (0, 2, 4)]
        torch.testing.assert_close(torch.cat([piece.joint_log_probs for piece in pieces]), whole)
        parts = sum(torch.autograd.grad(piece.joint_log_probs.sum(), network.weight)[0] for piece in pieces)
        torch.testing.assert_close(parts, gradient)


@every_method
@every_mode
@pytest.mark.parametrize("rows", [1, 3])
def test_masked_elements_follow_the_ode_and_are_not_scored(method: str, noisy: str, rows: int) -> None:
    mask = torch.ones(rows, ACTIONS, DIMS, dtype=torch.bool)
    mask[:, -1] = mask[:, :, -1] = False
    mask[-1, 0, 0] = False
    full = mask.expand(3, -1, -1)
    network, sampling, trace, scored = sampled(method, noisy, 4, 3, mask=mask)
    after = score_chain(network, trace, sampling, mask=mask)
    for score in (scored, after):
        assert not score.log_probs.movedim(1, -1)[~full].any() and not score.std.movedim(1, -1)[~full].any()
    if noisy == "all":  # a straight step, whatever the method
        x, t = trace["chain"][:, :-1], torch.linspace(1, 0.25, 4).expand(3, -1)
        v = network(x, t)
        straight = x - (v[0] if isinstance(v, tuple) else v) / 4
        torch.testing.assert_close(trace["chain"][:, 1:].movedim(1, -1)[~full], straight.movedim(1, -1)[~full])
    leaf = torch.zeros(3, after.mean.shape[1], ACTIONS, DIMS, requires_grad=True)

    def shifted(x: Tensor, t: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        output = network(x, t)
        return (output[0] + leaf, output[1]) if isinstance(output, tuple) else output + leaf

    score_chain(shifted, trace, sampling, mask=mask).joint_log_probs.sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()
    assert not leaf.grad.movedim(1, -1)[~full].any()
    assert bool(leaf.grad.any()) == (method != "ode")


def test_rows_with_noise_levels_of_their_own() -> None:
    network, sampling, trace, _ = sampled("sde", "all", 4, 2)
    levels = torch.tensor([0.3, 0.8])
    together = score_chain(network, trace, sampling, noise_level=levels).log_probs
    for row in (0, 1):
        part = {name: value[row : row + 1] for name, value in trace.items()}
        single = score_chain(network, part, sampling, noise_level=float(levels[row])).log_probs
        torch.testing.assert_close(together[row : row + 1], single)


def test_entropy_and_kl_add_up_over_the_steps() -> None:
    network, sampling, trace, _ = sampled("noise", "all", 4, 2)
    mine = score_chain(network, trace, sampling)
    with torch.no_grad():
        network.weight += 0.1
    other = score_chain(network, trace, sampling)
    normal = torch.distributions.Normal
    torch.testing.assert_close(mine.entropy, normal(mine.mean, mine.std).entropy().sum(1))
    exact = torch.distributions.kl_divergence(normal(mine.mean, mine.std), normal(other.mean, other.std)).sum(1)
    torch.testing.assert_close(mine.kl(other), exact)
    assert not mine.kl(mine).any()


def test_the_noisy_step_is_drawn_among_the_noisy_steps() -> None:
    uniforms = torch.tensor([0.0, 0.24, 0.26, 0.74, 0.76, 1 - 1e-12], dtype=torch.float64)
    assert noisy_step_index(uniforms, "sde", 4).tolist() == [0, 0, 1, 2, 3, 3]
    assert noisy_step_index(uniforms, "cps", 3).tolist() == [0, 0, 0, 1, 1, 1], "the last step of cps has no noise"
    assert [noisy_step_count(method, 4) for method in FLOW_METHODS] == [0, 4, 3, 4]
    for method, steps in (("cps", 1), ("ode", 4)):
        with pytest.raises(ValueError, match="no noisy step"):
            noisy_step_index(uniforms, method, steps)


# ------------------------------------------------------------------- normal data, for which everything is known exactly
def linear_velocity(parameters: Tensor, method: str) -> Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]:
    """The exact velocity, shifted by parameters [B, 3]: intercept, slope, input of the learned std."""

    def velocity(x: Tensor, t: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        known = {float(time): coefficients(float(time)) for time in t.unique()}
        intercept = sum((t == time) * value[0] for time, value in known.items())[..., None, None]
        slope = sum((t == time) * value[1] for time, value in known.items())[..., None, None]
        shift, tilt, h = parameters[:, None, None, None].unbind(-1)
        v = intercept + shift + (slope + tilt) * x
        return (v, learned_std(h).expand_as(v)) if method == "noise" else v

    return velocity


@pytest.mark.parametrize(("method", "level"), [("sde", 0.1), ("sde", 1.0), ("cps", 0.9), ("noise", 0.5)])
def test_samples_have_the_moments_that_follow_from_the_steps(method: str, level: float) -> None:
    rows, steps = 4000, 30 if method == "noise" else 200
    rng = torch.Generator().manual_seed(0)
    velocity = linear_velocity(torch.zeros(1, 3), method)
    with torch.no_grad():
        trace, _ = sample_chain(
            velocity,
            torch.randn(rows, 1, 1, generator=rng),
            torch.randn(rows, steps, 1, 1, generator=rng),
            FlowSampling(method, steps, "all"),
            noise_level=level,
        )
    x_0 = trace["chain"][:, -1]
    mean, std = reference_moments([method] * steps, stds=[LEARNED_STD] * steps, level=level)
    assert float(x_0.mean()) == pytest.approx(mean, abs=4 * std / math.sqrt(rows))
    assert float(x_0.std()) == pytest.approx(std, rel=4 / math.sqrt(2 * rows))
    if method == "sde":
        assert std == pytest.approx(0.3, abs=0.004)


def test_the_ode_sampler_reaches_the_data() -> None:
    x_1 = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64).view(3, 1, 1)
    x_0 = sample_ode(linear_velocity(torch.zeros(1, 3), "ode"), x_1, 400).flatten()
    torch.testing.assert_close(x_0, torch.tensor([0.4, 0.7, 1.0], dtype=torch.float64), atol=2e-3, rtol=0)


ROWS, STEPS = 60_000, 4


def score_gradients(method: str, noisy: str) -> tuple[Tensor, ScoredSteps, Tensor, Tensor | None]:
    """Parameters [B, 3] of each row, their scores, centred rewards [B], noisy steps [B]."""
    rng = torch.Generator().manual_seed(3)
    sampling = FlowSampling(method, STEPS, noisy)
    one = noisy == "one"
    parameters = torch.zeros(ROWS, 3, dtype=torch.float64, requires_grad=True)
    velocity = linear_velocity(parameters, method)
    shape = (ROWS, 1, 1) if one else (ROWS, STEPS, 1, 1)
    uniforms = torch.rand(ROWS, generator=rng)
    index = noisy_step_index(uniforms, method, STEPS) if one else None
    with torch.no_grad():
        trace, _ = sample_chain(
            velocity,
            torch.randn(ROWS, 1, 1, generator=rng, dtype=torch.float64),
            torch.randn(shape, generator=rng, dtype=torch.float64),
            sampling,
            index=index,
            noise_level=LEVEL,
        )
    x_0 = (trace["x_0"] if one else trace["chain"][:, -1]).flatten()
    reward = -((x_0 - TARGET) ** 2)
    return parameters, score_chain(velocity, trace, sampling, noise_level=LEVEL), reward - reward.mean(), index


def expected_gradient(method: str, noisy: str) -> Tensor:
    """What the noisy steps contribute to the derivative of the expected reward."""
    count = noisy_step_count(method, STEPS)
    if noisy == "all":
        found = reward_derivative([method] * STEPS, range(count), LEARNED_STD, STD_SLOPE)
        return torch.tensor(found, dtype=torch.float64)
    single = [["ode"] * i + [method] + ["ode"] * (STEPS - i - 1) for i in range(count)]
    parts = [reward_derivative(chain, [i], LEARNED_STD, STD_SLOPE) for i, chain in enumerate(single)]
    return torch.tensor(parts, dtype=torch.float64).mean(0)


def assert_within_error(samples: Tensor, expected: Tensor) -> None:
    error = samples.std(0) / math.sqrt(len(samples))
    assert ((samples.mean(0) - expected).abs() <= 4 * error + 1e-9).all(), (samples.mean(0), expected, error)
    assert (error[:2] < 0.1 * expected[:2].abs().max()).all(), "the estimate is too noisy to prove anything"


@pytest.mark.parametrize("method", ["sde", "cps", "noise"])
@every_mode
def test_the_policy_gradient_is_that_of_the_noisy_steps(method: str, noisy: str) -> None:
    parameters, scored, advantages, _ = score_gradients(method, noisy)
    (scores,) = torch.autograd.grad(scored.joint_log_probs.sum(), parameters)
    assert_within_error(advantages[:, None] * scores, expected_gradient(method, noisy))


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_dppo_without_clipping_is_the_policy_gradient_of_each_step(gamma: float) -> None:
    parameters, scored, advantages, _ = score_gradients("sde", "all")
    loss, clipped = dppo_loss(
        scored.log_probs,
        scored.log_probs.detach(),
        advantages,
        gamma=gamma,
        clip=torch.full((STEPS,), math.inf),
        clamp=None,
    )
    assert not clipped.any()
    (gradients,) = torch.autograd.grad(loss.sum(), parameters)
    parts = [reward_derivative(["sde"] * STEPS, [i]) for i in range(STEPS)]
    weights = torch.tensor([gamma ** (STEPS - i - 1) for i in range(STEPS)], dtype=torch.float64)
    assert_within_error(-gradients, weights @ torch.tensor(parts, dtype=torch.float64))


def test_what_the_gradient_estimates_leave_out() -> None:
    """Shares of the exact gradient, K = 4, along its direction; stated in docs/algorithms/flow-policies.md."""

    def share(method: str, noisy: str) -> float:
        count = noisy_step_count(method, STEPS)
        seen = expected_gradient(method, noisy)[:2] * (count if noisy == "one" else 1)
        chains = [[method] * STEPS]
        if noisy == "one":
            chains = [["ode"] * i + [method] + ["ode"] * (STEPS - i - 1) for i in range(count)]
        whole = [reward_derivative(chain, range(STEPS), LEARNED_STD, STD_SLOPE)[:2] for chain in chains]
        exact = torch.tensor(whole, dtype=torch.float64).mean(0)
        return float(seen @ exact / exact.square().sum())

    assert share("sde", "all") == share("noise", "all") == 1
    assert share("cps", "all") == pytest.approx(0.514, abs=2e-3), "the last step is deterministic"
    assert share("sde", "one") == pytest.approx(1.130, abs=2e-3), "steps of the ODE move with the parameters"
    assert share("cps", "one") == pytest.approx(0.599, abs=2e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_1": torch.zeros(2, 3)}, r"\[B, A, D\]"),
        ({"noise": torch.zeros(2, 4, 1, 3)}, "noise has shape"),
        ({"index": None}, "if and only if"),
        ({"index": torch.tensor([0, 4])}, "index must lie in"),
        ({"index": torch.tensor([0.0, 1.0])}, "int64"),
        ({"mask": torch.ones(1, 1, 3)}, "bool"),
        ({"mask": torch.ones(1, 3, 1, dtype=torch.bool)}, "mask has shape"),
        ({"noise_level": torch.zeros(3)}, "noise_level has shape"),
        ({"velocity": lambda x, t: x[..., :1]}, "velocity returned"),
        ({"sampling": FlowSampling("noise", 4)}, r"pair \(v, std\)"),
        ({"sampling": FlowSampling("sde", 4, "all")}, "noise has shape"),
    ],
)
def test_bad_arguments_of_the_sampler(changes: dict, words: str) -> None:
    arguments = {
        "velocity": lambda x, t: x,
        "x_1": torch.zeros(2, 1, 3),
        "noise": torch.zeros(2, 1, 3),
        "sampling": FlowSampling("sde", 4),
        "index": torch.tensor([0, 3]),
    }
    with pytest.raises(ValueError, match=words):
        sample_chain(**{**arguments, **changes})


def test_bad_arguments_of_the_scorer_and_the_configuration() -> None:
    chain = {"chain": torch.zeros(2, 5, 1, 3)}
    for trace, sampling, words in (
        (chain, FlowSampling("sde", 4), "lacks before, after, index"),
        (chain, FlowSampling("sde", 5, "all"), "chain has shape"),
    ):
        with pytest.raises(ValueError, match=words):
            score_chain(lambda x, t: x, trace, sampling)
    for wrong in ({"method": "x"}, {"noisy_steps": "two"}, {"steps": 0}, {"std_floor": -1.0}):
        with pytest.raises(ValueError):
            FlowSampling(**wrong)

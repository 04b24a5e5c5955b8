"""Chains of a flow policy as an action distribution."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvla.models.flow.distribution import FlowDistribution, noise_width
from rlvla.models.flow.head import FlowHead
from rlvla.models.flow.settings import FlowSettings

CHUNK, ROWS = (3, 2), 5
METHODS = ("sde", "cps", "noise")
NOISY = ("one", "all")


def velocity(x: Tensor, t: Tensor) -> Tensor:
    """A smooth function of noisy actions and time, different in five rows after each other."""
    rows = (1.0 + torch.arange(len(x)) % ROWS).view(-1, 1, 1, 1)
    return torch.tanh(0.5 * rows * x + t[..., None, None]) + 0.3 * x


def with_std(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a standard deviation that depends on both."""
    return velocity(x, t), 0.1 + 0.05 * torch.sigmoid(x + t[..., None, None])


def distribution(settings: FlowSettings, rows: int = ROWS, **options: float) -> FlowDistribution:
    """Of `rows` decisions."""
    blank = torch.zeros(rows, noise_width(settings, CHUNK))
    return FlowDistribution(with_std if settings.learns_std else velocity, settings, CHUNK, blank, **options)


def noise(settings: FlowSettings, rows: int = ROWS, seed: int = 0) -> Tensor:
    """Standard normal numbers [B, `noise_width`]."""
    return torch.randn(rows, noise_width(settings, CHUNK), generator=torch.Generator().manual_seed(seed))


def all_settings() -> list[FlowSettings]:
    """Every method with every kind and number of noisy steps that it has."""
    combinations = product(METHODS, NOISY, (1, 4, 10))
    return [FlowSettings(m, 0.5, k, n) for m, n, k in combinations if (m, k) != ("cps", 1)]


@pytest.mark.parametrize("settings", all_settings(), ids=lambda s: f"{s.method}-{s.noisy_steps}-{s.steps}")
@pytest.mark.parametrize("temperature", [1.0, 1.4])
def test_a_stored_chain_has_the_log_prob_it_was_sampled_with(settings: FlowSettings, temperature: float) -> None:
    """Whole batches and single rows alike."""
    sampled = distribution(settings, temperature=temperature).sample(noise(settings))
    assert sampled.log_probs.shape == (ROWS, 6) and sampled.log_probs.abs().min() > 0
    scored = distribution(settings, temperature=temperature).log_prob(sampled.trace)
    torch.testing.assert_close(scored, sampled.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.parametrize("method", METHODS)
def test_separate_step_scores_sum_to_the_chain(method: str, steps: int) -> None:
    """In the order (action, step, dimension); log-probs, entropy and KL alike."""
    if (method, steps) == ("cps", 1):
        pytest.skip("cps needs two steps")
    joint = FlowSettings(method, 0.9, steps, "all")
    apart = replace(joint, asked_scores="step_log_probs")
    assert apart.scores == "step_log_probs" and replace(apart, noisy_steps="one").scores == "log_probs"
    sampled = distribution(apart).sample(noise(apart))
    whole, steps_apart = (distribution(settings).given(sampled.trace) for settings in (joint, apart))
    assert sampled.log_probs.shape == (ROWS, 6 * steps)
    torch.testing.assert_close(steps_apart.log_prob({}), sampled.log_probs, atol=1e-5, rtol=0)
    if method == "cps" or steps == 10:  # its last steps are shorter than the floor
        return
    pairs = [(steps_apart.log_prob({}), whole.log_prob({}))]
    other = {"mean": whole.parameters()["mean"] + 0.1, "std": whole.parameters()["std"]}
    pairs.append((steps_apart.kl(other), whole.kl(other)))
    if method == "noise":
        pairs.append((steps_apart.entropy(), whole.entropy()))
    for columns, summed in pairs:
        torch.testing.assert_close(columns.view(ROWS, 3, steps, 2).sum(2).flatten(1), summed, atol=1e-4, rtol=0)
    one = columns_of_step(sampled.trace["chain"], steps - 1, steps, 0.9) if method == "sde" else None
    if one is not None:
        torch.testing.assert_close(sampled.log_probs.view(ROWS, 3, steps, 2)[:, :, -1], one, atol=1e-4, rtol=0)


def columns_of_step(chain: Tensor, index: int, steps: int, level: float) -> Tensor:
    """[B, A, D]: log-density of one sde step."""
    t, d = 1 - index / steps, 1 / steps
    x, after = chain[:, index], chain[:, index + 1]
    v = velocity(x[:, None], torch.full((len(x), 1), t))[:, 0]
    std = level * np.sqrt(d * t / (1 - (t if index else t - d)))
    mean = (1 - (t - d)) * (x - t * v) + ((t - d) - std**2 / (2 * t)) * (x + (1 - t) * v)
    return torch.distributions.Normal(mean, torch.tensor(std, dtype=mean.dtype)).log_prob(after)


@pytest.mark.parametrize("steps", [2, 4, 10])
@pytest.mark.parametrize(("method", "noisy"), list(product(("sde", "cps"), NOISY)))
def test_a_policy_is_mirrored_at_the_one_that_sampled(method: str, noisy: str, steps: int) -> None:
    """No shift at unchanged weights, and z^2 that averages 1; the shift of another policy is twice its KL."""
    settings = FlowSettings(method, 0.5, steps, noisy, asked_scores="mirrored")
    assert settings.scores == "mirrored" and replace(settings, method="noise").scores == "log_probs"
    rows = ROWS * 400
    sampled = distribution(settings, rows).sample(noise(settings, rows))
    terms = distribution(settings, rows).given(sampled.trace).mirrored(sampled.trace)
    assert all(value.shape == (rows, 6) for value in terms.values())
    torch.testing.assert_close(terms["shift"], torch.zeros(rows, 6), atol=1e-8, rtol=0)
    random = (steps - 1) / steps if (method, noisy) == ("cps", "all") else 1.0  # its last step has no noise
    assert float(terms["residual"].mean()) == pytest.approx(random, rel=0.05)

    def other(x: Tensor, t: Tensor) -> Tensor:
        return velocity(x, t) + 0.1 * torch.cos(x)

    theirs = FlowDistribution(other, settings, CHUNK, torch.zeros(rows, noise_width(settings, CHUNK)))
    given = theirs.given(sampled.trace)
    shift = given.mirrored(sampled.trace)["shift"]
    mine = distribution(settings, rows).given(sampled.trace)
    scored = mine.kl(given.parameters()) / (1 if noisy == "one" else steps)
    torch.testing.assert_close(0.5 * shift, scored, atol=1e-6, rtol=1e-3)
    assert shift.mean() > 1e-4


def test_the_noise_level_moves_linearly() -> None:
    """It is that of the decisions to come, and never past the end."""
    head = FlowHead(None, FlowSettings(noise_level=0.8), CHUNK)
    assert [head.anneal_noise(0.2, progress) for progress in (0.0, 0.5, 1.0, 2.0)] == pytest.approx(
        [0.8, 0.5, 0.2, 0.2]
    )
    assert head.noise_level == pytest.approx(0.2) and head.settings.noise_level == 0.8


def test_the_log_prob_is_the_density_of_the_noisy_step() -> None:
    """Against numpy, for a single sde step out of four."""
    settings = FlowSettings("sde", 0.7, 4, "one")
    trace = distribution(settings).sample(noise(settings)).trace
    scored = distribution(settings).log_prob(trace)
    for row in range(ROWS):
        i = int(trace["index"][row])
        t, d = 1 - i / 4, 0.25
        x, after = trace["before"][row].double().numpy(), trace["after"][row].double().numpy()
        v = velocity(trace["before"][:, None], torch.full((ROWS, 1), t))[row, 0].double().numpy()
        std = 0.7 * np.sqrt(d * t / (1 - (t if i else 1 - d)))
        x0, x1, weight = x - t * v, x + (1 - t) * v, (t - d) - std**2 / (2 * t)
        mean = (1 - (t - d)) * x0 + weight * x1
        expected = -0.5 * ((after - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
        np.testing.assert_allclose(scored[row].numpy(), expected.reshape(-1), atol=1e-4)


def test_greedy_decisions_follow_the_ode_from_their_noise() -> None:
    """Or from zero, if they are to start there."""
    settings = FlowSettings(steps=3)
    numbers = noise(settings)
    for eval_noise, start in (("sample", numbers[:, :6].view(-1, *CHUNK)), ("zero", torch.zeros(ROWS, *CHUNK))):
        x = start
        for i in range(3):
            x = x - velocity(x[:, None], torch.full((ROWS, 1), 1 - i / 3))[:, 0] / 3
        output = distribution(FlowSettings(steps=3, eval_noise=eval_noise)).sample(numbers, greedy=True)
        torch.testing.assert_close(output.actions, x)
        again = distribution(settings).log_prob(output.trace)
        torch.testing.assert_close(again, output.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(distribution(settings).sample(None).actions, output.actions)


def test_a_chain_is_scored_with_the_noise_level_it_was_sampled_with() -> None:
    """Even if the level has been annealed since."""
    settings = FlowSettings()
    sampled = distribution(settings, noise_level=0.9).sample(noise(settings))
    torch.testing.assert_close(distribution(settings, noise_level=0.1).log_prob(sampled.trace), sampled.log_probs)


@pytest.mark.parametrize("noisy", NOISY)
def test_surplus_actions_carry_no_noise(noisy: str) -> None:
    """Padding and actions past the executed ones follow the ODE and add nothing to the log-probs."""
    settings, whole = FlowSettings("sde", 0.5, 4, noisy), (5, 4)
    flow = FlowDistribution(velocity, settings, CHUNK, torch.zeros(ROWS, 1), denoised=whole)
    width = noise_width(settings, CHUNK, whole)
    assert width == 20 + (7 if noisy == "one" else 24)
    numbers = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))
    sampled, greedy = flow.sample(numbers), flow.sample(numbers, greedy=True)
    torch.testing.assert_close(flow.log_prob(sampled.trace), sampled.log_probs, atol=1e-5, rtol=0)
    assert sampled.actions.shape == (ROWS, *CHUNK) and sampled.log_probs.shape == (ROWS, 6)
    ends = [output.trace["x_0"] if noisy == "one" else output.trace["chain"][:, -1] for output in (sampled, greedy)]
    torch.testing.assert_close(ends[0][:, 3:], ends[1][:, 3:])  # `velocity` mixes no elements
    torch.testing.assert_close(ends[0][..., 2:], ends[1][..., 2:])
    assert (ends[0] - ends[1])[:, :3, :2].abs().min() > 1e-4
    torch.testing.assert_close(sampled.actions, ends[0][:, :3, :2])


def test_the_kl_is_the_mean_of_the_log_ratio() -> None:
    """Given where the steps started; both policies share the standard deviation."""
    settings, count = FlowSettings("sde", 0.5, 4, "all"), 4000

    def other(x: Tensor, t: Tensor) -> Tensor:
        return velocity(x, t) + 0.1 * torch.cos(x)

    rows = ROWS * count
    mine = distribution(settings, rows)
    theirs = FlowDistribution(other, settings, CHUNK, torch.zeros(rows, 1))
    sampled = mine.sample(noise(settings, rows))
    ratio = (sampled.log_probs - theirs.log_prob(sampled.trace)).double()
    exact = mine.given(sampled.trace).kl(theirs.given(sampled.trace).parameters()).double()
    difference = (ratio - exact).view(count, ROWS, -1)
    error = difference.std(0) / count**0.5
    assert ((difference.mean(0) / error).abs() < 5).all()
    assert exact.mean() > 5 * error.max()


def test_only_a_learned_standard_deviation_has_an_entropy_that_training_can_change() -> None:
    """That of the others is a constant."""
    for method in METHODS:
        settings = FlowSettings(method)
        given = distribution(settings).given(distribution(settings).sample(noise(settings)).trace)
        if method == "noise":
            assert given.entropy().shape == (ROWS, 6)
        else:
            with pytest.raises(NotImplementedError):
                given.entropy()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (FlowSettings(method="euler"), "method"),
        (FlowSettings(asked_scores="ratios"), "asked_scores"),
        (FlowSettings(noise_level=0.0), "noise_level"),
        (FlowSettings(noise_level=1.1), "noise_level"),
        (FlowSettings(steps=0), "steps"),
        (FlowSettings(method="cps", steps=1), "steps"),
        (FlowSettings(noisy_steps="some"), "noisy_steps"),
        (FlowSettings(eval_noise="none"), "eval_noise"),
    ],
)
def test_settings_out_of_range(settings: FlowSettings, name: str) -> None:
    """Each is named."""
    assert [setting for setting, _ in settings.problems()] == [name]

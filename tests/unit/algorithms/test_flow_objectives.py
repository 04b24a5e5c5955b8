"""Flow matching and the objectives that only flow-matching policies have."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvla.algorithms.flow import (
    cfm_loss,
    denoising_clip,
    denoising_discount,
    dppo_loss,
    flow_matching_time,
    fpo_log_ratio,
    gaussian_kl,
    gaussian_log_prob,
    interpolate,
    mirrored_loss,
    mirrored_terms,
    nft_loss,
    nft_reward,
    step_distribution,
    target_velocity,
)
from tests.support.gaussian_flow import (
    MEAN,
    STD,
    TARGET,
    coefficients,
    reference_moments,
    reference_step,
    reward_derivative,
)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


# ------------------------------------------------------------------------------------------------------- flow matching
def test_times_follow_the_beta_distribution() -> None:
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    times = flow_matching_time(uniforms)
    # CDF of Beta(1.5, 1) is s^1.5; its mean 1.5 / 2.5.
    torch.testing.assert_close(((times - 0.001) / 0.999) ** 1.5, uniforms)
    assert float(times.mean()) == pytest.approx(0.999 * 0.6 + 0.001, abs=1e-4)
    assert flow_matching_time(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([0.001, 1.0])


def test_the_line_from_noise_to_action() -> None:
    actions, noise = draw(2, 3, 4), draw(2, 3, 4) + 1
    torch.testing.assert_close(interpolate(actions, noise, 1.0), noise)
    torch.testing.assert_close(interpolate(actions, noise, 0.0), actions)
    slope = (interpolate(actions, noise, 0.6) - interpolate(actions, noise, 0.5)) / 0.1
    torch.testing.assert_close(slope, target_velocity(actions, noise))


def test_the_loss_of_a_pair_is_a_mean_over_what_counts() -> None:
    v, actions, noise = draw(2, 5, 3, 4).requires_grad_(), draw(2, 1, 3, 4), draw(2, 5, 3, 4).flip(0)
    mask = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    mask[0, :, 1:] = mask[:, :, :, 3] = False
    loss = cfm_loss(v, actions, noise, mask)
    expected = np.zeros((2, 5))
    for b in range(2):
        for n in range(5):
            kept = [(a, e) for a in range(3) for e in range(4) if mask[b, 0, a, e]]
            errors = [(v[b, n, a, e] - noise[b, n, a, e] + actions[b, 0, a, e]).item() ** 2 for a, e in kept]
            expected[b, n] = sum(errors) / len(kept)
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-12)
    loss.sum().backward()
    assert v.grad is not None and not v.grad[~mask.expand_as(v)].any() and v.grad[mask.expand_as(v)].all()
    torch.testing.assert_close(cfm_loss(v, actions, noise), cfm_loss(v, actions, noise, torch.ones_like(mask)))
    poisoned = noise.masked_fill(~mask, math.nan)
    torch.testing.assert_close(cfm_loss(v, actions, poisoned, mask), loss)
    assert cfm_loss(v, actions, noise, torch.zeros_like(mask)).tolist() == [[0.0] * 5] * 2


# ---------------------------------------------------------------------------------------------------------------- dppo
def test_schedules_of_denoising_steps() -> None:
    assert denoising_discount(4).tolist() == pytest.approx([0.99**3, 0.99**2, 0.99, 1.0])
    growth = [(math.exp(3 * i / 9) - 1) / (math.exp(3) - 1) for i in range(10)]
    assert denoising_clip(10).tolist() == pytest.approx([0.001 + 0.009 * g for g in growth])
    assert denoising_clip(1).tolist() == pytest.approx([0.01]) and denoising_discount(1).tolist() == [1.0]


def test_the_clipped_surrogate_of_each_step() -> None:
    rows, steps = 6, 4
    old = draw(rows, steps, 2, 3) * 2
    new = (old + 0.004 * draw(rows, steps, 2, 3).flip(0)).requires_grad_()
    advantages = draw(rows)
    mask = torch.ones(rows, 2, 3, dtype=torch.bool)
    mask[2, 1] = False
    loss, clipped = dppo_loss(new, old, advantages, mask=mask)
    for b in range(rows):
        for i in range(steps):
            terms = [
                min(max(new[b, i, a, e].item(), -5), 2) - min(max(old[b, i, a, e].item(), -5), 2)
                for a in range(2)
                for e in range(3)
                if mask[b, a, e]
            ]
            ratio, width = math.exp(sum(terms)), denoising_clip(steps)[i].item()
            weight = advantages[b].item() * 0.99 ** (steps - i - 1)
            bounded = min(max(ratio, 1 - width), 1 + width)
            assert loss[b, i].item() == pytest.approx(max(-weight * ratio, -weight * bounded), rel=1e-6)
            assert bool(clipped[b, i]) == (-weight * bounded > -weight * ratio)
    assert clipped.any() and not clipped.all()
    loss.sum().backward()
    outside = (new < -5) | (new > 2)
    assert new.grad is not None and outside.any() and not new.grad[outside].any()
    assert not new.grad[2, :, 1].any() and not new.grad[clipped].any() and new.grad.any()


def test_the_ratio_of_each_step_is_one_at_unchanged_weights() -> None:
    log_probs = draw(3, 4, 2, 3) * 4
    loss, clipped = dppo_loss(log_probs, log_probs, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), gamma=1.0)
    assert loss.tolist() == [[-1.0] * 4, [2.0] * 4, [-0.5] * 4] and not clipped.any()


# ----------------------------------------------------------------------------------------------------------------- fpo
def test_the_log_ratio_of_fpo() -> None:
    old, new = draw(3, 8), draw(3, 8).flip(0).requires_grad_()
    np.testing.assert_allclose(fpo_log_ratio(old, new).detach(), old.numpy().mean(1) - new.detach().numpy().mean(1))
    assert fpo_log_ratio(old, old.clone()).tolist() == [0.0] * 3
    fpo_log_ratio(old, new).sum().backward()
    torch.testing.assert_close(new.grad, torch.full_like(new, -1 / 8))


# Printed by benchmarks/flow_marginals.py, which integrates by quadrature.
FPO_SHARE, FPO_COSINE = 0.179, 0.981


def fpo_gradient() -> tuple[Tensor, Tensor]:
    """The estimate of FPO's surrogate at unchanged weights for each of many actions [B, 2], and the exact gradient.

    Parameters: intercept and slope added to the exact velocity; actions from the ODE in 4 steps.
    """
    rows, pairs, steps = 40_000, 8, 4
    rng = torch.Generator().manual_seed(0)
    mean, std = reference_moments(["ode"] * steps)
    actions = mean + std * torch.randn(rows, 1, 1, 1, generator=rng, dtype=torch.float64)
    noise = torch.randn(rows, pairs, 1, 1, generator=rng, dtype=torch.float64)
    t = flow_matching_time(torch.rand(rows, pairs, 1, 1, generator=rng, dtype=torch.float64))
    x = interpolate(actions, noise, t)
    variance = t**2 + (1 - t) ** 2 * STD**2
    slope = (t - (1 - t) * STD**2) / variance
    parameters = torch.zeros(rows, 1, 1, 2, dtype=torch.float64, requires_grad=True)
    v = -MEAN + slope * (x - (1 - t) * MEAN) + parameters[..., :1] + parameters[..., 1:] * x
    intercept, tilt = coefficients(float(t[0, 0]))
    assert float(v[0, 0].detach()) == pytest.approx(intercept + tilt * float(x[0, 0]))
    loss = cfm_loss(v, actions, noise)
    reward = -((actions.flatten() - TARGET) ** 2)
    (gradient,) = torch.autograd.grad(fpo_log_ratio(loss, loss).sum(), parameters)
    exact = torch.tensor(reward_derivative(["ode"] * steps, range(steps))[:2], dtype=torch.float64)
    return (reward - reward.mean())[:, None] * gradient.view(rows, 2), exact


def test_the_bias_of_fpo_is_what_the_documentation_says() -> None:
    samples, exact = fpo_gradient()
    found, error = samples.mean(0), samples.std(0) / math.sqrt(len(samples))
    share = float(found @ exact / exact.square().sum())
    spread = float(((error * exact).square().sum().sqrt()) / exact.square().sum())
    cosine = float(found @ exact / (found.norm() * exact.norm()))
    assert abs(share - FPO_SHARE) < 4 * spread + 1e-3
    assert abs(share - 1) > 10 * spread, "biased: a surrogate"
    assert cosine == pytest.approx(FPO_COSINE, abs=0.02), "of nearly the right direction"


# ----------------------------------------------------------------------------------------------------------------- nft
def steps_of(method: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """v_old, x, x_next, t [3, 2, 4] (t: [3, 1, 1]) and std of three different steps of K = 4."""
    v, x, t = draw(3, 2, 4), draw(3, 2, 4).flip(0), torch.tensor([1.0, 0.75, 0.5], dtype=torch.float64)[:, None, None]
    std = torch.full((1,), 0.12, dtype=torch.float64) if method == "noise" else None
    mean, deviation = step_distribution(x, v, t, 0.25, method=method, std=std)
    return v, x, mean + deviation * draw(3, 2, 4).flip(1), t, deviation


@pytest.mark.parametrize("method", ["sde", "cps", "noise"])
def test_nft_against_a_loop(method: str) -> None:
    v_old, x, x_next, t, deviation = steps_of(method)
    std = deviation if method == "noise" else None
    v = v_old + 0.3 * draw(3, 2, 4).flip(2)
    reward = torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64)
    mask = torch.ones(1, 2, 4, dtype=torch.bool)
    mask[..., -1] = False
    found = nft_loss(
        v, v_old, x, x_next, t, 0.25, reward, beta=0.7, method=method, std=std, mask=mask, reduction="none"
    )
    for b in range(3):
        errors = []
        for sign in (1, -1):
            squares = []
            for a in range(2):
                for e in range(3):
                    mirrored = (v_old + sign * 0.7 * (v - v_old))[b, a, e].item()
                    mean, _ = reference_step(x[b, a, e].item(), mirrored, b, 4, method)
                    squares.append((mean - x_next[b, a, e].item()) ** 2)
            errors.append(sum(squares) / len(squares))
        r = reward[b].item()
        assert found[b].item() == pytest.approx(r * errors[0] + (1 - r) * errors[1], rel=1e-9)
    total = nft_loss(v, v_old, x, x_next, t, 0.25, reward, beta=0.7, method=method, std=std, mask=mask)
    torch.testing.assert_close(total, found.mean())


@pytest.mark.parametrize("method", ["sde", "cps", "noise"])
@pytest.mark.parametrize("r", [0.0, 0.25, 0.5, 1.0])
def test_the_gradient_of_nft_at_the_old_policy_is_that_of_the_log_prob(method: str, r: float) -> None:
    v_old, x, x_next, t, deviation = steps_of(method)
    std = deviation if method == "noise" else None
    v = v_old.clone().requires_grad_()
    nft_loss(
        v, v_old, x, x_next, t, 0.25, r, beta=0.6, method=method, std=std, weight=deviation**-2, reduction="none"
    ).sum().backward()
    other = v_old.clone().requires_grad_()
    gaussian_log_prob(
        x_next, step_distribution(x, other, t, 0.25, method=method, std=std)[0], deviation
    ).sum().backward()
    assert v.grad is not None and other.grad is not None
    torch.testing.assert_close(v.grad, -(2 * r - 1) * 0.6 * other.grad * 2 / 8)
    # Plain weights, by hand: d mean / d v = -t (1 - n) + (1 - t) w for the weights of the table.
    plain = v_old.clone().requires_grad_()
    nft_loss(plain, v_old, x, x_next, t, 0.25, r, beta=0.6, method=method, std=std, reduction="none").sum().backward()
    for b in range(3):
        at = [reference_step(0.0, value, b, 4, method)[0] for value in (0.0, 1.0)]
        mean = step_distribution(x, v_old, t, 0.25, method=method, std=std)[0]
        by_hand = (2 * r - 1) * 0.6 * 2 * (mean - x_next)[b] * (at[1] - at[0]) / 8
        assert plain.grad is not None
        torch.testing.assert_close(plain.grad[b], by_hand)


def test_nft_learns_from_what_went_well_and_unlearns_what_did_not() -> None:
    v_old, x, x_next, t, _ = steps_of("sde")
    for r, closer in ((1.0, True), (0.0, False)):
        v = v_old.clone().requires_grad_()
        nft_loss(v, v_old, x, x_next, t, 0.25, r).backward()
        assert v.grad is not None
        before, after = (
            (step_distribution(x, w, t, 0.25, method="sde")[0] - x_next).square().sum()
            for w in (v_old, v_old - 0.1 * v.grad)
        )
        assert (after < before) == closer


def test_advantages_as_rewards() -> None:
    assert nft_reward(torch.tensor([-5.0, -1.0, 0.0, 1.0, 5.0]), 2.0).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_bad_arguments() -> None:
    x, chunks = torch.zeros(2, 3, 4), torch.zeros(2, 4, 3, 4)
    advantages, mask = torch.zeros(2), torch.ones(2, 3, 4, dtype=torch.bool)
    for call, words in (
        (lambda: flow_matching_time(torch.tensor([1.5])), "uniforms"),
        (lambda: cfm_loss(chunks, x, chunks), "actions has shape"),
        (lambda: cfm_loss(x, x, x, x), "bool"),
        (lambda: denoising_discount(0), "steps"),
        (lambda: denoising_discount(3, 1.1), "gamma"),
        (lambda: denoising_clip(3, base=0.2, top=0.1), "base"),
        (lambda: dppo_loss(x, x, advantages), r"\[B, K, A, D\]"),
        (lambda: dppo_loss(chunks, chunks, x), "advantages"),
        (lambda: dppo_loss(chunks, chunks, advantages, clip=torch.ones(3)), "clip"),
        (lambda: dppo_loss(chunks, chunks, advantages, clamp=(2.0, -5.0)), "clamp"),
        (lambda: dppo_loss(chunks, chunks, advantages, mask=mask[:, :2]), "mask has shape"),
        (lambda: fpo_log_ratio(torch.zeros(2), torch.zeros(2)), r"\[B, n\]"),
        (lambda: fpo_log_ratio(torch.zeros(2, 3), torch.zeros(2, 4)), r"\[B, n\]"),
        (lambda: nft_reward(advantages, 0.0), "clip"),
        (lambda: nft_loss(x, x[:1], x, x, 0.5, 0.25, 1.0), "v_old"),
        (lambda: nft_loss(x, x, x, x, 0.5, 0.25, 1.5), "reward must lie"),
        (lambda: nft_loss(chunks, chunks, chunks, chunks, 0.5, 0.25, advantages), "reward has shape"),
        (lambda: nft_loss(x, x, x, x, 0.5, 0.25, 1.0, beta=0.0), "beta"),
        (lambda: nft_loss(x, x, x, x, 0.5, 0.25, 1.0, weight=-1.0), "weight"),
        (lambda: nft_loss(x, x, x, x, 0.5, 0.25, 1.0, mask=x), "bool"),
        (lambda: nft_loss(x, x, x, x, 0.5, 0.25, 1.0, reduction="sum"), "reduction"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("method", ["sde", "cps"])
@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_the_terms_of_nft_make_the_same_loss(method: str, beta: float) -> None:
    """With weights 1 / std^2: value, gradient, and nothing from masked elements and rows."""
    generator = torch.Generator().manual_seed(1)

    def normal() -> torch.Tensor:
        return torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)

    v, v_old, x, x_next, t, d = normal().requires_grad_(), normal(), normal(), normal(), 0.5, 0.25
    reward = torch.tensor([1.0, 0.0, 0.3, 1.0], dtype=torch.float64)
    mask = torch.ones(4, 3, 2, dtype=torch.bool)
    mask[1, 1:] = mask[3] = False
    mean, std = step_distribution(x, v, t, d, method=method)
    mean_old, _ = step_distribution(x, v_old, t, d, method=method)
    options = {"beta": beta, "method": method, "mask": mask, "weight": std.detach() ** -2, "reduction": "none"}
    direct = nft_loss(v, v_old, x, x_next, t, d, reward, **options)
    terms = mirrored_terms(mean, mean_old, x_next, std)
    columns = {name: values.flatten(1) for name, values in terms.items()}
    found = mirrored_loss(columns, reward, mask.flatten(1), beta=beta)
    torch.testing.assert_close(found, direct)
    gradients = [torch.autograd.grad(loss.sum(), v, retain_graph=True)[0] for loss in (found, direct)]
    torch.testing.assert_close(*gradients)
    assert (gradients[0][~mask] == 0).all() and (gradients[0][mask] != 0).all()
    kl = gaussian_kl(mean_old, std, mean, std)
    torch.testing.assert_close(0.5 * terms["shift"], kl)
    still = mirrored_terms(mean, mean_old, x_next, torch.zeros_like(std))
    assert all((values == 0).all() for values in still.values())
    with pytest.raises(ValueError, match="beta"):
        mirrored_loss(columns, reward, mask.flatten(1), beta=0.0)

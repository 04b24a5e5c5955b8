"""Decisions of a flow policy without noise, scored by their flow-matching loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlvla.algorithms import get_policy_loss
from rlvla.algorithms.flow import cfm_loss, fpo_log_ratio, interpolate
from rlvla.models.flow.distribution import FlowMatching, noise_width
from rlvla.models.flow.settings import FlowSettings

CHUNK, ROWS = (3, 2), 5


def velocity(x: Tensor, t: Tensor) -> Tensor:
    """A smooth function of noisy actions and time."""
    return torch.tanh(x + t[..., None, None]) + 0.3 * x


def other(x: Tensor, t: Tensor) -> Tensor:
    """Another one."""
    return velocity(x, t) + 0.2 * torch.cos(x)


def of(steps: int, function=velocity, eval_noise: str = "sample") -> FlowMatching:
    """Of `ROWS` decisions."""
    settings = FlowSettings("ode", steps=steps, eval_noise=eval_noise)
    assert settings.scores == "matching"
    return FlowMatching(function, settings, CHUNK, torch.zeros(ROWS, noise_width(settings, CHUNK)))


def noise(seed: int = 0) -> Tensor:
    """[B, `noise_width`]."""
    return torch.randn(ROWS, noise_width(FlowSettings("ode"), CHUNK), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_actions_follow_the_ode_and_keep_their_score(steps: int) -> None:
    """Sampled and greedy ones alike."""
    sampled = of(steps).sample(noise())
    x = noise()[:, :6].view(ROWS, *CHUNK)
    for i in range(steps):
        x = x - velocity(x[:, None], torch.full((ROWS, 1), 1 - i / steps))[:, 0] / steps
    torch.testing.assert_close(sampled.actions, x)
    torch.testing.assert_close(of(steps).log_prob(sampled.trace), sampled.log_probs, atol=1e-6, rtol=0)
    torch.testing.assert_close(of(steps).sample(noise(), greedy=True).actions, x)
    zero = of(steps, eval_noise="zero").sample(noise(), greedy=True)
    torch.testing.assert_close(zero.actions, of(steps).sample(None).actions)
    assert not torch.equal(zero.trace["pair_noise"], torch.zeros_like(zero.trace["pair_noise"]))


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_the_ratio_of_a_decision_is_that_of_fpo(steps: int) -> None:
    """The columns sum to minus the mean loss over the pairs; the clipped surrogate is of their change."""
    sampled = of(steps).sample(noise())
    trace, losses = sampled.trace, []
    assert trace["pair_time"].shape == (ROWS, 8) and trace["pair_time"].min() > 0
    for function in (velocity, other):
        x = interpolate(trace["x_0"][:, None], trace["pair_noise"], trace["pair_time"][..., None, None])
        losses.append(cfm_loss(function(x, trace["pair_time"]), trace["x_0"][:, None], trace["pair_noise"]))
    new = of(steps, other).log_prob(trace)
    expected = fpo_log_ratio(*losses)
    torch.testing.assert_close((new - sampled.log_probs).sum(1), expected, atol=1e-6, rtol=0)
    advantages, mask = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0]), torch.ones(ROWS, 6, dtype=torch.bool)
    ratio = expected.exp()
    by_hand = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.95, 1.05)).mean()
    spread = advantages[:, None].expand(-1, 6)
    loss, measured = get_policy_loss("fpo")(new, sampled.log_probs, spread, mask)
    torch.testing.assert_close(loss, by_hand, atol=1e-6, rtol=1e-5)
    assert 0 <= measured["pg_clipfrac"] <= 1


def test_masked_columns_get_no_gradient() -> None:
    """Masked columns get no gradient; the rest of the row counts as before."""
    sampled = of(4).sample(noise())
    new = of(4, other).log_prob(sampled.trace).requires_grad_()
    mask = torch.ones(ROWS, 6, dtype=torch.bool)
    mask[0, 2:] = mask[1] = False
    get_policy_loss("fpo")(new, sampled.log_probs, torch.ones(ROWS, 6), mask, fpo_clip=10.0)[0].backward()
    assert (new.grad[~mask] == 0).all() and (new.grad[mask] != 0).all()
    ratio = (new - sampled.log_probs)[0, :2].sum().exp()
    torch.testing.assert_close(new.grad[0, :2], (-ratio / ROWS).expand(2).detach())

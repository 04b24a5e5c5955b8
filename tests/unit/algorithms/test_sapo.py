"""SAPO against a plain loop, and its options."""

from __future__ import annotations

import math

import pytest
import torch

from rlvla.algorithms.policy_losses import POLICY_LOSSES, get_policy_loss


def slow(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, pos: float, neg: float):
    """Mean over rows of the mean over valid tokens of -A sigmoid(tau (rho - 1)) 4 / tau."""
    rows = []
    for b in range(len(new)):
        tokens = []
        for t in range(new.shape[1]):
            if mask[b, t]:
                advantage = float(advantages[b, t])
                tau = pos if advantage > 0 else neg
                ratio = math.exp(max(-20.0, min(20.0, float(new[b, t] - old[b, t]))))
                tokens.append(-advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))))
        rows.append(sum(tokens) / len(tokens) if tokens else 0.0)
    return sum(rows) / len(rows)


@pytest.mark.parametrize(("pos", "neg"), [(1.0, 1.05), (2.0, 0.5)])
def test_sapo_equals_a_plain_loop(pos: float, neg: float) -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(5, 7, generator=generator) < 0.7
    mask[:, 0] = True
    loss, _ = get_policy_loss("sapo")(new, old, advantages, mask, tau_pos=pos, tau_neg=neg)
    assert float(loss) == pytest.approx(slow(new, old, advantages, mask, pos, neg), rel=1e-6)


def test_the_gradient_at_equal_policies_is_the_policy_gradient() -> None:
    """The gate has slope 1 at ratio 1 whatever its steepness."""
    new = torch.zeros(1, 2, requires_grad=True)
    advantages, mask = torch.tensor([[3.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
    loss, _ = get_policy_loss("sapo")(new, torch.zeros(1, 2), advantages, mask, tau_pos=7.0, tau_neg=0.3)
    loss.backward()
    torch.testing.assert_close(new.grad, -advantages / 2)


def test_its_options_are_its_keyword_arguments() -> None:
    options = POLICY_LOSSES.options("sapo")
    assert options is not None and options(tau_pos=2.0).arguments() == {"tau_pos": 2.0, "tau_neg": 1.05}

"""Losses, targets and weights of implicit Q-learning, against slow references and examples by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlvla.algorithms.iql import awr_weights, expectile_loss, iql_loss, td_targets
from rlvla.algorithms.recap import ReturnScale


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.95])
def test_the_minimum_of_the_expectile_loss_is_the_expectile(expectile: float) -> None:
    """Where the weighted distances of the targets above and below balance (Newey and Powell 1987)."""
    targets = torch.from_numpy(np.random.default_rng(0).normal(size=501))
    losses = [float(expectile_loss(targets - value, expectile).sum()) for value in np.linspace(-3, 3, 1201)]
    best = float(np.linspace(-3, 3, 1201)[int(np.argmin(losses))])
    above = sum(t - best for t in targets.tolist() if t > best)
    below = sum(best - t for t in targets.tolist() if t <= best)
    assert expectile * above == pytest.approx((1 - expectile) * below, rel=0.02)
    slow = [(expectile if e >= 0 else 1 - expectile) * e * e for e in targets.tolist()]
    assert expectile_loss(targets, expectile).tolist() == pytest.approx(slow)


@pytest.mark.parametrize("success", [True, False])
def test_targets_against_slow_ones(success: bool) -> None:
    """Rewards summed step by step until the chunk of 5 actions ends and there is an observation."""
    scale, length, steps = ReturnScale(30, 1.5), 23, np.array([0, 3, 5, 10, 16, 20])
    values = np.array([-0.9, -0.2, 0.3, -1.7, -0.5, -0.1])  # outside [-1, 0], too
    later, rewards = scale.rewards_until(steps, length, 5)
    inside = later < len(steps)
    paid = rewards + np.where(inside, 0.0, scale.end(success))
    next_values = np.append(values, 0.0)[later]
    arrays = (torch.from_numpy(array) for array in (paid, next_values, inside))
    found = td_targets(*arrays).tolist()
    for row, start in enumerate(steps.tolist()):
        total, step, target = 0.0, start, None
        while target is None:
            if step == length:
                target = total - (0.0 if success else 1.5 * 30)
            elif step >= start + 5 and step in steps:
                bootstrap = min(max(values[steps.tolist().index(step)], -1.0), 0.0)
                target = total + bootstrap * 2.5 * 30
            else:
                total, step = total - 1, step + 1
        assert found[row] == pytest.approx(target / (2.5 * 30))


def test_the_loss_of_v_and_q_and_where_gradients_go() -> None:
    rng = np.random.default_rng(1)
    values, targets = torch.from_numpy(rng.normal(size=7)), torch.from_numpy(rng.normal(size=7))
    q, slow_q = torch.from_numpy(rng.normal(size=(7, 2))), torch.from_numpy(rng.normal(size=(7, 2)))
    for tensor in (values, targets, q, slow_q):
        tensor.requires_grad_()
    loss = iql_loss(values, q, slow_q, targets, 0.8)
    loss.sum().backward()
    assert values.grad.all() and q.grad.all() and targets.grad is None and slow_q.grad is None
    loss, values, q, slow_q, targets = (tensor.detach() for tensor in (loss, values, q, slow_q, targets))
    for row in range(7):
        error = min(slow_q[row].tolist()) - float(values[row])
        wanted = (0.8 if error > 0 else 0.2) * error**2 + sum((x - float(targets[row])) ** 2 for x in q[row].tolist())
        assert float(loss[row]) == pytest.approx(wanted)


def test_weights_against_slow_ones() -> None:
    advantages = np.random.default_rng(2).normal(-0.1, 0.05, size=400)
    mean = sum(advantages) / 400
    deviation = math.sqrt(sum((a - mean) ** 2 for a in advantages) / 400)
    raw = [min(weight, 1.5) for weight in (math.exp(2.0 * (a - mean) / deviation) for a in advantages)]
    found = awr_weights(advantages, 2.0, 1.5)
    assert found.weights.tolist() == pytest.approx([weight / (sum(raw) / 400) for weight in raw])
    assert found.clipped == sum(math.exp(2.0 * (a - mean) / deviation) > 1.5 for a in advantages) / 400 > 0
    assert found.effective == pytest.approx(sum(raw) ** 2 / (400 * sum(weight**2 for weight in raw)))
    scaled = awr_weights(1000 * advantages + 7, 2.0, 1.5)
    assert scaled.weights == pytest.approx(found.weights), "the same for every task, and where V is too high"
    assert (awr_weights(advantages, 0.0, 100).weights == 1).all() and awr_weights(advantages, 0.0, 100).effective == 1
    assert (awr_weights(np.full(3, -0.2), 3.0, 100).weights == 1).all()
    for far in (np.array([-1.0, 0.0, 1e3]), np.array([-20.0, -20.1])):
        assert np.isfinite(awr_weights(far, 100.0, 100).weights).all(), "neither overflow nor weights that are all 0"

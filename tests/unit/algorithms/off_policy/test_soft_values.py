"""Soft values, targets and random subsets of critics."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest
import torch

from rlvla.algorithms.off_policy import random_critics, reduce_critics, soft_target, soft_value

Q = torch.tensor([[1.0, 5.0], [3.0, 2.0], [2.0, 2.0]])


def test_critics_are_reduced_over_their_own_dimension() -> None:
    assert reduce_critics(Q).tolist() == [1, 2]
    assert reduce_critics(Q, "mean").tolist() == [2, 3]
    with pytest.raises(ValueError, match="unknown reduction of critics 'max'; known: min, mean"):
        reduce_critics(Q, "max")


def test_both_entropies_count_with_their_temperatures() -> None:
    log_probs, choice = torch.tensor([-1.0, 4.0]), torch.tensor([-2.0, -0.5])
    assert soft_value(Q, log_probs, alpha=0.1).tolist() == pytest.approx([1 + 0.1, 2 - 0.4])
    found = soft_value(Q, log_probs, choice, alpha=0.1, alpha_primitives=0.2, reduction="mean")
    assert found.tolist() == pytest.approx([2 + 0.1 + 0.4, 3 - 0.4 + 0.1])
    alphas = [torch.tensor(x, requires_grad=True) for x in (0.1, 0.2)]
    q = Q.clone().requires_grad_()
    soft_value(q, log_probs, choice, alpha=alphas[0], alpha_primitives=alphas[1]).sum().backward()
    assert alphas[0].grad is None and alphas[1].grad is None and q.grad is not None


def test_a_truncated_row_bootstraps_and_a_terminated_one_does_not() -> None:
    gamma, n = 0.9, torch.tensor([1, 3, 2])
    terminated = torch.tensor([False, False, True])  # the second row was truncated
    discounts = gamma**n * ~terminated
    values = torch.tensor([10.0, 20.0, math.nan], requires_grad=True)
    targets = soft_target(torch.tensor([1.0, 2.0, 3.0]), discounts, values)
    assert targets.tolist() == pytest.approx([1 + 0.9 * 10, 2 + 0.9**3 * 20, 3])
    assert not targets.requires_grad
    double = soft_target(torch.ones(1, dtype=torch.float64), torch.ones(1), torch.ones(1))
    assert double.dtype == torch.float64 and targets.dtype == torch.float32


def test_the_whole_backup() -> None:
    """r + gamma^n (1 - terminated) [min Q' - alpha_s log pi_k - alpha_p log pi_x], from what replay gives."""
    log_probs, choice = torch.tensor([-1.0, 4.0]), torch.tensor([-2.0, -0.5])
    value = soft_value(Q[[0, 2]], log_probs, choice, alpha=0.3, alpha_primitives=0.7)
    targets = soft_target(torch.tensor([1.0, -1.0]), torch.tensor([0.81, 0.0]), value)
    assert targets.tolist() == pytest.approx([1 + 0.81 * (min(1, 2) - 0.7 * -2 - 0.3 * -1), -1])


def test_nothing_is_broadcast_by_mistake() -> None:
    with pytest.raises(ValueError, match=r"log_probs has shape \[2, 1\]"):
        soft_value(Q, torch.zeros(2, 1), alpha=0.1)
    with pytest.raises(ValueError, match=r"primitive_log_probs has shape \[1\]"):
        soft_value(Q, torch.zeros(2), torch.zeros(1), alpha=0.1)
    with pytest.raises(ValueError, match=r"next_values has shape \[2, 1\]"):
        soft_target(torch.zeros(2), torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"discounts has shape \[\]"):
        soft_target(torch.zeros(2), torch.tensor(0.9), torch.zeros(2))


def test_all_subsets_of_critics_are_equally_likely() -> None:
    generator, draws = torch.Generator().manual_seed(0), 6000
    subsets = Counter(tuple(sorted(random_critics(5, 2, generator).tolist())) for _ in range(draws))
    error = math.sqrt(draws * 0.1 * 0.9)
    assert set(subsets) == set(combinations(range(5), 2))
    assert all(abs(count - draws / 10) < 5 * error for count in subsets.values())


def test_a_random_subset_is_unbiased() -> None:
    """Mean and minimum over a random subset have the expectation over all subsets."""
    q = torch.tensor([3.0, -1.0, 0.5, 2.0, 7.0], dtype=torch.float64)
    every = torch.tensor(list(combinations(range(5), 3)))
    generator = torch.Generator().manual_seed(1)
    for reduction, wanted in (("mean", float(q.mean())), ("min", float(q[every].amin(1).mean()))):
        drawn = torch.stack([reduce_critics(q[random_critics(5, 3, generator)], reduction) for _ in range(4000)])
        assert float(drawn.mean()) == pytest.approx(wanted, abs=5 * float(drawn.std()) / math.sqrt(4000))


def test_subsets_are_reproducible_and_checked() -> None:
    first, second = (random_critics(10, 2, torch.Generator().manual_seed(3)).tolist() for _ in range(2))
    assert first == second
    assert sorted(random_critics(4, 4).tolist()) == [0, 1, 2, 3]
    for size in (0, 5):
        with pytest.raises(ValueError, match=f"a subset of {size} out of 4"):
            random_critics(4, size)

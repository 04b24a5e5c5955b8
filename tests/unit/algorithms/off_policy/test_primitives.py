"""Choice and parameters of action primitives."""

from __future__ import annotations

import math

import pytest
import torch

from rlvla.algorithms.off_policy import critic_actions, over_primitives, parameter_mask, primitive_log_probs


def test_logits_are_clamped() -> None:
    logits = torch.tensor([[100.0, -100.0, 3.0]], requires_grad=True)
    log_probs = primitive_log_probs(logits)
    total = math.exp(10) + math.exp(-10) + math.exp(3)
    assert log_probs[0].tolist() == pytest.approx([x - math.log(total) for x in (10, -10, 3)], abs=1e-6)
    log_probs[0, 2].backward()
    assert logits.grad[0, :2].tolist() == [0, 0] and logits.grad[0, 2] == pytest.approx(1 - math.exp(3) / total)
    assert primitive_log_probs(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_expectations_are_over_the_last_dimension() -> None:
    probabilities = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    values = torch.tensor([[10.0, 20.0], [1.0, 3.0]])
    assert over_primitives(probabilities.log(), values).tolist() == pytest.approx([18, 2])
    uniform = primitive_log_probs(torch.zeros(1, 5))
    assert over_primitives(uniform, -uniform).tolist() == pytest.approx([math.log(5)])


def test_a_primitive_uses_its_first_parameters() -> None:
    assert parameter_mask([2, 0, 3]).tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert parameter_mask([1], 3).tolist() == [[True, False, False]]
    for sizes, width in (([4], 3), ([-1, 2], None), ([], None)):
        with pytest.raises(ValueError, match="sizes"):
            parameter_mask(sizes, width)


def test_critics_read_the_primitive_and_what_it_uses() -> None:
    mask = parameter_mask([2, 0, 3])
    parameters = torch.full((2, 3), 0.5).masked_fill(torch.tensor([[False, False, True], [True] * 3]), math.nan)
    parameters.requires_grad_()
    actions = critic_actions(torch.tensor([0, 1]), parameters, mask)
    assert actions.tolist() == [[1, 0, 0, 0.5, 0.5, 0], [0, 1, 0, 0, 0, 0]]
    actions.sum().backward()
    assert parameters.grad.tolist() == [[1, 1, 0], [0, 0, 0]]
    every = critic_actions(torch.arange(3).expand(2, 3), torch.ones(2, 3, 3), mask)
    assert every.shape == (2, 3, 6) and torch.equal(every[0, :, :3], torch.eye(3))
    assert torch.equal(every[1, :, 3:], mask.float())
    with pytest.raises(ValueError, match=r"parameters has shape \[2, 2\]"):
        critic_actions(torch.tensor([0, 1]), torch.ones(2, 2), mask)

"""Columns of log-probs at three levels, against loops over single entries."""

from __future__ import annotations

import pytest
import torch

from rlvla.algorithms.columns import Columns

B, A, PER_ACTION = 5, 3, 4
K = A * PER_ACTION
LEVELS = ["token", "action", "chunk"]


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(B, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def mask() -> torch.Tensor:
    """Whole rows with all and with none, and anything in between."""
    mask = torch.rand(B, K, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0], mask[1] = True, False
    return mask


def members(level: str, column: int) -> list[int]:
    """The log-probs of a column."""
    name = {"token": lambda k: k, "action": lambda k: k // PER_ACTION, "chunk": lambda k: 0}[level]
    return [k for k in range(K) if name(k) == column]


@pytest.mark.parametrize("level", LEVELS)
def test_every_method_equals_a_loop(level: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    columns = Columns(level, K, PER_ACTION)
    count = {"token": K, "action": A, "chunk": 1}[level]
    groups = [members(level, column) for column in range(count)]
    assert (columns.count, columns.width) == (count, len(groups[0]))
    first, valid_ones, total = columns.first(values), columns.any(mask), columns.sum(values, mask)
    spread, starts = columns.spread(first), columns.starts(mask)
    assert first.shape == valid_ones.shape == total.shape == (B, count) and spread.shape == starts.shape == (B, K)
    for row in range(B):
        for column, group in enumerate(groups):
            valid = [k for k in group if mask[row, k]]
            assert first[row, column] == values[row, group[0]]
            assert bool(valid_ones[row, column]) == bool(valid)
            assert float(total[row, column]) == pytest.approx(sum(float(values[row, k]) for k in valid), abs=1e-12)
            for k in group:
                assert spread[row, k] == first[row, column]
                assert bool(starts[row, k]) == (bool(mask[row, k]) and k == group[0])


@pytest.mark.parametrize("level", LEVELS)
def test_numbers_of_executed_actions_count_once(level: str) -> None:
    columns = Columns(level, K, PER_ACTION)
    rewards = torch.randn(B, A, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    executed = torch.tensor([[True] * A, [False] * A, [True, False, False], [True, True, False], [True] * A])
    found = columns.of_actions(rewards, executed.repeat_interleave(PER_ACTION, 1))
    for row in range(B):
        for column in range(columns.count):
            # An action is paid at the last of its log-probs.
            last = [k // PER_ACTION for k in members(level, column) if k % PER_ACTION == PER_ACTION - 1]
            wanted = sum(float(rewards[row, action]) for action in last if executed[row, action])
            assert float(found[row, column]) == pytest.approx(wanted, abs=1e-12)
    assert float(found.sum()) == pytest.approx(float(rewards[executed].sum()), abs=1e-12)


def test_what_is_masked_may_be_anything(values: torch.Tensor, mask: torch.Tensor) -> None:
    dirty = torch.where(mask, values, torch.nan)
    columns = Columns("action", K, PER_ACTION)
    assert torch.equal(columns.sum(dirty, mask), columns.sum(values, mask))


def test_policies_with_one_log_prob_per_action_have_the_same_columns_at_two_levels(values: torch.Tensor) -> None:
    token, action = Columns("token", K, 1), Columns("action", K, 1)
    assert token.count == action.count == K and torch.equal(token.first(values), action.first(values))
    everything = torch.ones(B, K, dtype=torch.bool)
    assert torch.equal(action.of_actions(values, everything), values)


def test_leading_dimensions_are_kept(values: torch.Tensor, mask: torch.Tensor) -> None:
    columns = Columns("action", K, PER_ACTION)
    assert columns.sum(values[None, :, None], mask[None, :, None]).shape == (1, B, 1, A)
    assert columns.any(mask[0]).shape == (A,) and columns.spread(torch.zeros(2, A)).shape == (2, K)

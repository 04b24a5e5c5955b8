"""Rewards divided by the running standard deviation of the episodes' scores, and clipped step by step."""

import pytest
import torch

from rlvla.algorithms.reward_scaling import RewardScaling

ALL = torch.ones(2, 2, dtype=torch.bool)


def test_the_divisor_is_the_deviation_of_all_scores_so_far():
    scaling, batches = (
        RewardScaling(normalize=True),
        (torch.tensor([1.0, 5.0, 3.0]), torch.tensor([]), torch.arange(4.0)),
    )
    for scores in batches:
        scaling.update(scores.double())
    assert scaling.divisor == pytest.approx(float(torch.cat(batches).std(correction=0)))
    rewards = torch.tensor([[0.0, 2.0], [-1.0, 0.5]])
    assert torch.allclose(scaling(rewards, ALL), rewards / scaling.divisor)


def test_equal_scores_leave_the_rewards_alone():
    scaling, rewards = RewardScaling(normalize=True), torch.tensor([[0.0, 0.3], [0.0, 0.0]])
    assert torch.equal(scaling(rewards, ALL), rewards), "nothing was seen yet"
    scaling.update(torch.full((8,), 0.3, dtype=torch.float64))
    assert scaling.divisor == 1.0


def test_each_step_is_clipped_after_the_division_and_what_was_not_executed_stays_zero():
    scaling = RewardScaling(normalize=True, clip=(0.25, 1.0))
    scaling.update(torch.tensor([0.0, 4.0], dtype=torch.float64))  # deviation 2
    executed = torch.tensor([[True, True], [True, False]])
    scaled = scaling(torch.tensor([[8.0, 1.0], [-3.0, 0.0]]), executed)
    assert scaled.tolist() == [[1.0, 0.5], [0.25, 0.0]]


def test_without_either_option_nothing_changes():
    scaling = RewardScaling()
    scaling.update(torch.tensor([1.0, 9.0], dtype=torch.float64))
    assert not scaling.active and scaling.divisor == 1.0


def test_the_state_goes_on_where_it_was():
    before, after = RewardScaling(normalize=True), RewardScaling(normalize=True)
    before.update(torch.tensor([1.0, 2.0, 7.0], dtype=torch.float64))
    after.load_state_dict(before.state_dict())
    for scaling in (before, after):
        scaling.update(torch.tensor([4.0], dtype=torch.float64))
    assert before.state_dict() == after.state_dict() and after.divisor == before.divisor != 1.0


def test_a_range_that_is_none():
    with pytest.raises(ValueError, match="low < high"):
        RewardScaling(clip=(1.0, 1.0))

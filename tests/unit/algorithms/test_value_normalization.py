import pytest
import torch

from rlvla.algorithms.value_normalization import StateNormalizer, ValueNormalizer
from tests.support.algorithm_cases import random_batch


def test_running_moments_equal_those_of_everything_seen():
    normalizer, seen = ValueNormalizer(), []
    for seed in range(3):
        b = random_batch(seed)
        returns = b["adv"] * (seed + 1) + 100.0
        normalizer.update(returns, b["mask"])
        seen.append(returns[b["mask"]])
    everything = torch.cat(seen)
    assert normalizer.mean == pytest.approx(float(everything.mean()), rel=1e-12)
    assert normalizer.std == pytest.approx(float(everything.std(correction=0)), rel=1e-12)
    normalized = normalizer.normalize(everything)
    assert float(normalized.mean()) == pytest.approx(0.0, abs=1e-12)
    torch.testing.assert_close(normalizer.denormalize(normalized), everything)


def test_state_survives_a_checkpoint_and_an_empty_batch_changes_nothing():
    b = random_batch(1)
    normalizer, resumed = ValueNormalizer(), ValueNormalizer()
    normalizer.update(b["adv"], b["mask"])
    resumed.load_state_dict(normalizer.state_dict())
    resumed.update(b["adv"], torch.zeros_like(b["mask"]))
    assert resumed.state_dict() == normalizer.state_dict()


def test_two_returns_have_a_deviation_and_one_has_none():
    one, two = ValueNormalizer(), ValueNormalizer()
    one.update(torch.tensor([[7.0]]), torch.tensor([[True]]))
    two.update(torch.tensor([[1.0, 5.0]]), torch.tensor([[True, True]]))
    assert (one.std, two.std) == (1.0, 2.0)


def test_before_data_and_with_constant_returns():
    normalizer = ValueNormalizer(epsilon=1e-3)
    assert float(normalizer.normalize(torch.tensor(3.0))) == 3.0
    normalizer.update(torch.full((2, 2), 5.0), torch.ones(2, 2, dtype=torch.bool))
    assert normalizer.std == 1e-3
    with pytest.raises(ValueError, match="epsilon"):
        ValueNormalizer(epsilon=0.0)
    with pytest.raises(ValueError, match="bool"):
        normalizer.update(torch.ones(2, 2), torch.ones(2, 2))


def test_states_have_the_moments_of_everything_seen_and_survive_a_checkpoint():
    normalizer, resumed, draw = StateNormalizer(3), StateNormalizer(3), torch.Generator().manual_seed(0)
    seen = [torch.randn(n, 3, generator=draw) * torch.tensor([5.0, 1.0, 1e-5]) + 7.0 for n in (4, 1, 9)]
    for states in seen:
        normalizer.update(states)
    everything = torch.cat(seen).double()
    std = everything.std(0, correction=0).clamp(min=0.02)  # the last number hardly changes
    resumed.load_state_dict(normalizer.state_dict())
    for one in (normalizer, resumed):
        torch.testing.assert_close(one(seen[2]), ((seen[2] - everything.mean(0)) / std).float(), atol=1e-5, rtol=1e-5)
    assert normalizer(torch.full((1, 3), 1e6)).tolist() == [[10.0] * 3], "clipped"

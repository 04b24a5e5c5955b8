import pytest
import torch

from rlvla.algorithms.filtering import filter_groups, groups_to_sample

IDS = ["a", "b", "a", "c", "b", "c", "a", "b", "c", "a"]


def success_of(rates):
    """One success flag per row so that each group has the wanted number of successes."""
    left = dict(rates)
    flags = []
    for name in IDS:
        flags.append(left[name] > 0)
        left[name] -= 1
    return torch.tensor(flags)


def test_bounds_are_inclusive():
    result = filter_groups(IDS, success=success_of({"a": 1, "b": 3, "c": 0}), accuracy_bounds=(0.25, 1.0))
    assert [name for name, keep in zip(IDS, result.keep.tolist()) if keep] == ["a", "b", "a", "b", "a", "b", "a"]
    assert (result.num_groups, result.kept_groups) == (3, 2)
    assert result.dropped == {"accuracy_low": 1, "accuracy_high": 0}


def test_a_rate_on_a_bound_that_is_no_binary_fraction_is_kept():
    success = torch.tensor([True] * 7 + [False] * 3)
    assert filter_groups([0] * 10, success=success, accuracy_bounds=(0.7, 0.9)).keep.all()
    assert filter_groups([0] * 10, success=success, accuracy_bounds=(0.1, 0.7)).keep.all()
    assert not filter_groups([0] * 10, success=success, accuracy_bounds=(0.71, 0.9)).keep.any()


def test_every_dropped_group_counts_under_one_reason():
    success = success_of({"a": 0, "b": 3, "c": 1})
    scores = success.float()
    truncated = torch.tensor([name == "c" and i == 3 for i, name in enumerate(IDS)])
    result = filter_groups(IDS, success=success, accuracy_bounds=(0.1, 0.9), scores=scores, truncated=truncated)
    assert result.dropped == {"accuracy_low": 1, "accuracy_high": 1, "zero_variance": 0, "truncated": 1}
    assert result.kept_groups == 0
    assert not result.keep.any()


def test_zero_variance_alone():
    scores = torch.tensor([1.0, 0.1, 1.0, 0.0, 0.1, 1.0, 1.0, 0.1, 0.0, 1.0])
    result = filter_groups(IDS, scores=scores)
    assert [name for name, keep in zip(IDS, result.keep.tolist()) if keep] == ["c", "c", "c"]
    assert result.dropped == {"zero_variance": 2}


def test_bad_input():
    with pytest.raises(ValueError, match="no filter"):
        filter_groups(IDS)
    with pytest.raises(ValueError, match="needs success"):
        filter_groups(IDS, scores=torch.zeros(10), accuracy_bounds=(0.1, 0.9))
    with pytest.raises(ValueError, match="lower <= upper"):
        filter_groups(IDS, success=torch.zeros(10), accuracy_bounds=(0.9, 0.1))
    with pytest.raises(ValueError, match="must all be"):
        filter_groups(IDS, success=torch.zeros(10), scores=torch.zeros(9))
    with pytest.raises(ValueError, match="bool"):
        filter_groups(IDS, truncated=torch.zeros(10))


def test_groups_to_sample_rounds_up():
    assert groups_to_sample(3, 1.0) == 3
    assert groups_to_sample(3, 1.5) == 5
    assert groups_to_sample(0, 2.0) == 0
    with pytest.raises(ValueError, match="oversample_factor"):
        groups_to_sample(3, 0.5)


def test_any_number_can_be_bounded_and_both_bounds_belong_to_the_range():
    lengths = torch.tensor([10.0 if name == "a" else 20.0 if name == "b" else 30.0 for name in IDS])
    result = filter_groups(IDS, metric=lengths, metric_bounds=(10.0, 20.0))
    assert [name for name, keep in zip(IDS, result.keep.tolist()) if not keep] == ["c"] * IDS.count("c")
    assert result.dropped == {"metric_low": 0, "metric_high": 1}
    assert filter_groups(IDS, metric=lengths, metric_bounds=(15.0, 20.0)).dropped == {"metric_low": 1, "metric_high": 1}
    nowhere = torch.where(lengths == 20.0, torch.nan, lengths)
    assert filter_groups(IDS, metric=nowhere, metric_bounds=(0.0, 99.0)).dropped == {"metric_low": 0, "metric_high": 1}
    with pytest.raises(ValueError, match="lower <= upper"):
        filter_groups(IDS, metric=lengths, metric_bounds=(2.0, 1.0))

import numpy as np
import pytest
import torch

from rlvla.algorithms.groups import Groups, group_index

KINDS = [
    ["b", "a", "b", "c"],
    [7, 3, 7, 1],
    [("x", 1), "y", ("x", 1), None],
    np.array(["uid-b", "uid-a", "uid-b", "uid-c"]),
    np.array([2.5, 1.0, 2.5, 7.0]),
    torch.tensor([5, 2, 5, 9]),
    list(torch.tensor([5, 2, 5, 9])),
]


@pytest.mark.parametrize("ids", KINDS, ids=lambda ids: type(ids).__name__)
def test_any_kind_of_id(ids):
    index, count = group_index(ids, 4)
    assert count == 3
    assert index.dtype == torch.int64
    assert index[0] == index[2]
    assert len({int(i) for i in index}) == 3


def test_statistics():
    groups = Groups(["a", "b", "a", "a"], 4)
    values = torch.tensor([1.0, 5.0, 2.0, 6.0], dtype=torch.float64)
    assert groups.size.tolist() == [3, 1, 3, 3]
    assert groups.sum(values).tolist() == [9.0, 5.0, 9.0, 9.0]
    assert groups.mean(values).tolist() == [3.0, 5.0, 3.0, 3.0]
    torch.testing.assert_close(groups.std(values)[0], torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64).std())
    assert groups.std(values)[1] == 0.0
    assert groups.max(values).tolist() == [6.0, 5.0, 6.0, 6.0]
    assert groups.min(values).tolist() == [1.0, 5.0, 1.0, 1.0]
    assert groups.constant(values).tolist() == [False, True, False, False]
    assert groups.constant(torch.full_like(values, 0.1)).all()
    assert groups.first_where(values >= 2).tolist() == [False, True, True, False]


def test_bad_ids():
    with pytest.raises(ValueError, match="3 entries but the batch has 4 rows"):
        group_index(["a", "b", "c"], 4)
    with pytest.raises(ValueError, match=r"\[2, 2\].*4 rows"):
        group_index(torch.zeros(2, 2), 4)
    with pytest.raises(ValueError, match="hashable"):
        group_index([["a"], ["b"]], 2)

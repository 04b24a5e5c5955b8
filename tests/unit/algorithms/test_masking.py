import pytest
import torch

from rlvla.algorithms.masking import masked_mean, masked_sum, masked_var, masked_whiten, whiten_per_task, whiten_rows
from tests.support import slow_reference as slow
from tests.support.algorithm_cases import random_batch


@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
def test_equals_the_slow_reference(garbage):
    b = random_batch(1, garbage=garbage)
    values, mask = slow.rows_of(b["adv"]), slow.masks_of(b["mask"])
    mean, var = slow.mean_var(values, mask)
    assert float(masked_mean(b["adv"], b["mask"])) == pytest.approx(mean, rel=1e-12)
    assert float(masked_var(b["adv"], b["mask"])) == pytest.approx(var, rel=1e-12)
    assert float(masked_var(b["adv"], b["mask"], unbiased=False)) == pytest.approx(
        slow.mean_var(values, mask, 0)[1], rel=1e-12
    )
    white = torch.where(b["mask"], masked_whiten(b["adv"], b["mask"]), 0.0)
    torch.testing.assert_close(white, torch.tensor(slow.whiten(values, mask), dtype=torch.float64))
    unshifted = masked_whiten(b["adv"], b["mask"], shift_mean=False)
    torch.testing.assert_close(unshifted[b["mask"]] - mean, white[b["mask"]])
    sums = [sum(v for v, m in zip(vs, ms) if m) for vs, ms in zip(values, mask)]
    torch.testing.assert_close(masked_sum(b["adv"], b["mask"], 1), torch.tensor(sums, dtype=torch.float64))


def test_each_task_is_whitened_by_itself():
    b = random_batch(1, rows=7, garbage=float("nan"))
    tasks = torch.tensor([0, 2, 0, 1, 2, 2, 0])  # of task 1 there is one row, of task 3 none
    b["mask"][3] = False
    b["mask"][3, 0] = True
    white = whiten_per_task(b["adv"], b["mask"], tasks, 4)
    for task in (0, 2):
        rows = tasks == task
        expected = slow.whiten(slow.rows_of(b["adv"][rows]), slow.masks_of(b["mask"][rows]))
        torch.testing.assert_close(white[rows], torch.tensor(expected, dtype=torch.float64))
    assert not white[3].any(), "one entry has no spread"
    alone = whiten_per_task(b["adv"], b["mask"], torch.zeros(7, dtype=torch.long), 1)
    assert torch.equal(alone[b["mask"]], masked_whiten(b["adv"], b["mask"])[b["mask"]])


def test_rows_without_valid_entries_have_mean_zero():
    mean = masked_mean(torch.full((2, 3), torch.nan), torch.zeros(2, 3, dtype=torch.bool), -1)
    assert mean.tolist() == [0.0, 0.0]


def test_a_large_offset_costs_no_digits():
    values = torch.tensor([[1e6, 1e6 + 1e-3, 1e6 + 2e-3]], dtype=torch.float64)
    assert float(masked_var(values, torch.ones(1, 3, dtype=torch.bool))) == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_results_are_float32_or_better(dtype):
    values = torch.ones(2, 300, dtype=dtype)
    assert masked_mean(values, torch.ones(2, 300, dtype=torch.bool)).dtype == torch.float32
    assert float(masked_sum(values, torch.ones(2, 300, dtype=torch.bool))) == 600.0  # beyond the integers of bfloat16


def test_gradients():
    b = random_batch(2, rows=3, tokens=4, garbage=0.0)
    values = b["adv"].requires_grad_()
    for function in (masked_mean, masked_var, masked_whiten):
        assert torch.autograd.gradcheck(lambda v, f=function: f(v, b["mask"]), (values,))
    dirty = torch.where(b["mask"], b["adv"].detach(), torch.nan).requires_grad_()
    masked_var(dirty, b["mask"]).backward()
    assert (dirty.grad[~b["mask"]] == 0).all()


def test_too_few_entries():
    mask = torch.tensor([[True, False]])
    with pytest.raises(ValueError, match="at least 2 valid entries, got 1"):
        masked_var(torch.ones(1, 2), mask)
    assert float(masked_var(torch.ones(1, 2), mask, unbiased=False)) == pytest.approx(0.0, abs=1e-12)


def test_bad_input():
    with pytest.raises(ValueError, match="bool"):
        masked_mean(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"\[2, 2\].*\[2, 3\]"):
        masked_mean(torch.ones(2, 2), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="list"):
        masked_mean([1.0], torch.ones(1, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [2.3, -0.1, 1e6, 0.0])
def test_constant_values_are_whitened_to_exactly_zero(dtype, value):
    mask = torch.rand(512, 448, generator=torch.Generator().manual_seed(0)) < 0.7
    values = torch.full(mask.shape, value, dtype=dtype).masked_fill(~mask, torch.nan)
    assert not masked_whiten(values, mask)[mask].any()
    assert float(masked_var(values, mask)) == 0.0
    rows = torch.full((7,), value, dtype=dtype)
    counts = torch.tensor([3, 0, 1, 5, 1, 1, 2])
    assert not whiten_rows(rows.masked_fill(counts == 0, torch.nan), counts)[counts > 0].any()


def test_values_that_differ_in_the_last_bit_are_not_constant():
    values = torch.tensor([[1.0, 1.0 + 2**-23, 1.0]])
    assert masked_whiten(values, torch.ones(1, 3, dtype=torch.bool))[0, 1] > 0

"""The policy losses of flow-matching policies, on columns as the trainer passes them."""

from __future__ import annotations

import pytest
import torch

from rlvla.algorithms import get_policy_loss, register_policy_loss
from rlvla.algorithms.flow import denoising_clip, denoising_discount, dppo_loss
from rlvla.algorithms.policy_losses import POLICY_LOSSES

ROWS, A, D = 5, 3, 2


def columns(steps: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """New and old log-probs, advantages and mask, [B, A * S * D]: one row is cut off, one is empty."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(ROWS, A * steps * D, generator=generator, dtype=torch.float64).clamp(-4, 1.5)
    new = old + 0.01 * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64).expand_as(old)
    mask = torch.ones(ROWS, A, steps, D, dtype=torch.bool)
    mask[1, 1:] = mask[2] = False
    return new, old, advantages, mask.flatten(1)


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_dppo_on_columns_is_that_of_steps(steps: int) -> None:
    """The mean over rows and steps; an empty row counts 0, as the others are counted over all ranks."""
    new, old, advantages, mask = columns(steps, steps)
    loss, measured = get_policy_loss("dppo")(
        new, old, advantages, mask, column_shape=(A, steps, D), num_sequences=ROWS - 1, dp_size=1
    )
    by_step = [values.view(ROWS, A, steps, D).transpose(1, 2) for values in (new, old, mask)]
    kept = torch.tensor([0, 1, 3, 4])
    chunk_mask = by_step[2][kept][:, 0]
    expected, clipped = dppo_loss(by_step[0][kept], by_step[1][kept], advantages[kept, 0], mask=chunk_mask)
    torch.testing.assert_close(loss, expected.mean())
    assert float(measured["pg_clipfrac"]) == pytest.approx(float(clipped.double().mean()), abs=1e-6)
    assert 0 < measured["pg_clipfrac"] < 1


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_dppo_at_unchanged_weights_is_the_discounted_policy_gradient(steps: int) -> None:
    """Each step at its place, none from what was masked or lies beyond the clamp."""
    _, old, advantages, mask = columns(steps, 3)
    old[3, 0], old[3, 1] = -6.0, 3.0
    new = old.clone().requires_grad_()
    get_policy_loss("dppo")(new, old, advantages, mask, column_shape=(A, steps, D))[0].backward()
    discount = denoising_discount(steps).double()[None, None, :, None]
    expected = (-advantages.view(ROWS, A, steps, D) * discount / (ROWS * steps)).flatten(1)
    expected = torch.where(mask, expected, 0.0)
    expected[3, :2] = 0.0
    torch.testing.assert_close(new.grad, expected)


def test_options_of_dppo_reach_the_formula() -> None:
    """Discount and clip widths."""
    batch = columns(4, 7)
    shape = {"column_shape": (A, 4, D)}
    plain = float(get_policy_loss("dppo")(*batch, **shape)[0])
    for option in ({"denoising_gamma": 0.5}, {"denoising_clip": (0.1, 0.1)}):
        assert float(get_policy_loss("dppo")(*batch, **shape, **option)[0]) != pytest.approx(plain, rel=1e-6)
    assert denoising_clip(4).tolist() == pytest.approx([0.001, 0.00181, 0.00401, 0.01], abs=1e-5)
    with pytest.raises(ValueError, match="columns"):
        get_policy_loss("dppo")(*batch, column_shape=(A, 3, D))


@pytest.mark.parametrize("name", ["dppo", "fpo"])
def test_parts_of_a_batch_sum_to_it(name: str) -> None:
    """Normalized by the rows of the whole."""
    batch = columns(1, 5)
    whole, parts = (
        sum(get_policy_loss(name)(*(value[rows] for value in batch), num_sequences=4)[0] for rows in slices)
        for slices in ([slice(None)], [slice(0, 1), slice(1, 5)])
    )
    torch.testing.assert_close(whole, parts)


def test_losses_say_what_they_are_of() -> None:
    """So that policies without it are refused."""
    assert [POLICY_LOSSES.attribute(name, "scores") for name in ("ppo", "dppo", "fpo")] == [
        "log_probs",
        "step_log_probs",
        "matching",
    ]
    with pytest.raises(ValueError, match="unknown scores"):
        register_policy_loss("another", scores="guesses")

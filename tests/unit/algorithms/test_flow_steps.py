"""One denoising step: its table, density, entropy, KL and schedules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvla.algorithms.choices import FLOW_METHODS
from rlvla.algorithms.flow import (
    anneal_noise_level,
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
    learned_std,
    predict_action,
    predict_noise,
    step_distribution,
    time_grid,
)
from tests.support.gaussian_flow import MEAN, STD, coefficients, reference_moments, reference_step


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("steps", [1, 3, 4, 10, 49])
def test_the_grid_ends_at_zero_in_equal_steps(steps: int) -> None:
    grid = time_grid(steps)
    assert grid.shape == (steps + 1,) and grid[0] == 1 and grid[-1] == 0
    torch.testing.assert_close(grid[:-1] - grid[1:], torch.full((steps,), 1 / steps))


def test_predictions_undo_the_interpolation() -> None:
    action, noise, t = draw(2, 3), draw(3, 2).T, 0.3
    x, v = t * noise + (1 - t) * action, noise - action
    torch.testing.assert_close(predict_action(x, v, t), action)
    torch.testing.assert_close(predict_noise(x, v, t), noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.parametrize("method", FLOW_METHODS)
def test_steps_follow_the_table(method: str, steps: int, dtype: torch.dtype) -> None:
    x, v = draw(steps, 2, 3, dtype=dtype), draw(steps, 3, 2, dtype=dtype).mT
    std = torch.full((3,), 0.11, dtype=dtype) if method == "noise" else None
    times = time_grid(steps, dtype=dtype)
    expected = np.array(
        [
            [[reference_step(x[i, a, e].item(), v[i, a, e].item(), i, steps, method, 0.6, 0.11) for e in range(3)]
             for a in range(2)]
            for i in range(steps)
        ]
    )  # fmt: skip
    together = step_distribution(x, v, times[:-1, None, None], 1 / steps, method=method, noise_level=0.6, std=std)
    for i in range(steps):
        second = float(times[1]) if i == 0 else None
        single = step_distribution(
            x[i],
            v[i],
            float(times[i]),
            torch.tensor(1 / steps, dtype=dtype),
            method=method,
            noise_level=0.6,
            next_t=second,
            std=std,
        )
        for part in (0, 1):
            assert single[part].dtype == dtype and single[part].shape == x[i].shape
            np.testing.assert_allclose(
                single[part], expected[i, ..., part], atol=1e-6 if dtype == torch.float32 else 1e-13
            )
            torch.testing.assert_close(single[part], together[part][i])
    if method == "cps":
        assert not together[1][-1].any(), "the last step is deterministic to the bit"


def test_noise_levels_differ_by_row_and_low_precision_is_computed_in_float32() -> None:
    x, v, level = draw(2, 1, 3), draw(3, 1, 2).mT.reshape(2, 1, 3), torch.tensor([0.2, 0.9])[:, None, None]
    mean, std = step_distribution(x, v, 0.5, 0.25, method="sde", noise_level=level)
    for row in (0, 1):
        single = step_distribution(x[row], v[row], 0.5, 0.25, method="sde", noise_level=float(level[row]))
        torch.testing.assert_close((mean[row], std[row]), single, atol=1e-7, rtol=1e-6)
    half = step_distribution(x.bfloat16(), v.bfloat16(), 0.5, 0.25, method="sde")[0]
    whole = step_distribution(x.bfloat16().float(), v.bfloat16().float(), 0.5, 0.25, method="sde")[0]
    assert half.dtype == torch.float32 and torch.equal(half, whole)


def test_the_floor_of_the_std_leaves_zeros_and_the_marginals_alone() -> None:
    x, v = draw(1, 1), draw(1, 1)
    assert step_distribution(x, v, 0.1, 0.1, method="cps", std_floor=0.1)[1] == 0
    assert step_distribution(x, v, 0.5, 0.1, method="noise", std=torch.tensor(0.05), std_floor=0.1)[1] == 0.1
    mean, std = step_distribution(x, v, 0.1, 0.1, method="sde", std_floor=0.1)
    # The level whose std is the floor itself.
    equivalent = 0.1 / math.sqrt(0.1 * 0.1 / 0.9)
    torch.testing.assert_close((mean, std), step_distribution(x, v, 0.1, 0.1, method="sde", noise_level=equivalent))


def moments(method: str, level: float, steps: int) -> tuple[float, float]:
    """Mean and standard deviation at t = 0 on normal data, where each step maps x to start + factor * x + noise."""
    times = time_grid(steps, dtype=torch.float64)[:-1]
    lines = torch.tensor([coefficients(t) for t in times.tolist()], dtype=torch.float64)
    v = torch.stack([lines[:, 0], lines.sum(1)], 1).unsqueeze(-1)  # at x = 0 and x = 1
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand_as(v)
    means, stds = step_distribution(x, v, times[:, None, None], 1 / steps, method=method, noise_level=level)
    mean, variance = 0.0, 1.0
    for (start, end), std in zip(means[..., 0].tolist(), stds[:, 0, 0].tolist()):
        mean, variance = start + (end - start) * mean, (end - start) ** 2 * variance + std**2
    return mean, math.sqrt(variance)


@pytest.mark.parametrize("level", [0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_sde_preserves_the_marginals_of_the_data_and_cps_does_not(level: float) -> None:
    assert moments("sde", level, 200) == pytest.approx((MEAN, STD), abs=0.004)
    assert moments("sde", level, 2000) == pytest.approx((MEAN, STD), abs=0.001)
    shrunk = {0.1: 0.297, 0.5: 0.274, 0.9: 0.225}.get(level)
    if shrunk is not None:
        assert moments("cps", level, 200) == pytest.approx((MEAN, shrunk), abs=0.0015)
        assert moments("cps", level, 800) == pytest.approx((MEAN, shrunk), abs=0.002)
    for method in ("sde", "cps"):
        assert moments(method, level, 10) == pytest.approx(reference_moments([method] * 10, level=level))


def test_the_last_step_survives_accumulated_rounding() -> None:
    t = torch.tensor(1.0)
    for _ in range(199):
        t = t - torch.tensor(1 / 200)
    x = torch.zeros(1, 1)
    assert not step_distribution(x, x, t, 1 / 200, method="cps")[1].any()


def test_log_probs_are_those_of_a_normal_distribution() -> None:
    x, mean, std = draw(2, 4, 3), draw(4, 2, 3).reshape(2, 4, 3), draw(4, 3).abs() + 0.1
    expected = torch.distributions.Normal(mean, std).log_prob(x)
    torch.testing.assert_close(gaussian_log_prob(x, mean, std), expected)
    torch.testing.assert_close(gaussian_log_prob(x.float(), mean.float(), std.float()), expected.float())
    torch.testing.assert_close(gaussian_entropy(std), torch.distributions.Normal(mean, std).entropy()[0])


def test_elements_without_noise_contribute_nothing_and_receive_no_gradient() -> None:
    x = torch.tensor([[0.3, math.nan, 5.0]], requires_grad=True)
    mean = torch.tensor([[0.1, 0.2, -5.0]], requires_grad=True)
    std = torch.tensor([[0.5, 0.0, 0.0]], requires_grad=True)
    log_prob = gaussian_log_prob(x, mean, std)
    assert log_prob[0, 0] != 0 and log_prob[0, 1:].tolist() == [0, 0]
    (log_prob.sum() + gaussian_entropy(std).sum() + gaussian_kl(mean, std, mean + 1, std).sum()).backward()
    for leaf in (x, mean, std):
        assert leaf.grad is not None and leaf.grad[0, 1:].tolist() == [0, 0] and leaf.grad.isfinite().all()
    assert x.grad is not None and x.grad[0, 0] != 0


@pytest.mark.parametrize("other_std", [0.2, 0.31])
def test_kl_in_closed_form_equals_its_monte_carlo_estimate(other_std: float) -> None:
    mean, other, std = torch.tensor([[0.1, -0.4]]), torch.tensor([[0.3, -0.45]]), torch.tensor(0.2)
    exact = gaussian_kl(mean, std, other, torch.tensor(other_std))
    x = mean + std * torch.randn(200_000, 1, 2, generator=torch.Generator().manual_seed(0))
    ratio = gaussian_log_prob(x, mean.expand_as(x), std) - gaussian_log_prob(
        x, other.expand_as(x), torch.tensor(other_std)
    )
    error = ratio.std(0) / math.sqrt(len(x))
    assert ((ratio.mean(0) - exact).abs() < 4 * error).all()
    if other_std == 0.2:
        torch.testing.assert_close(exact, (mean - other) ** 2 / (2 * 0.2**2))


def test_the_learned_std_interpolates_the_log_variance() -> None:
    h = torch.tensor([-50.0, -0.3, 0.0, 0.8, 50.0], dtype=torch.float64)
    low, high = math.log(0.08**2), math.log(0.16**2)
    expected = [math.sqrt(math.exp(low + (math.tanh(x) + 1) / 2 * (high - low))) for x in h.tolist()]
    torch.testing.assert_close(learned_std(h), torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(learned_std, h[1:4].clone().requires_grad_())


def test_the_noise_level_anneals_linearly() -> None:
    assert [anneal_noise_level(0.9, 0.1, p) for p in (0.0, 0.25, 1.0, 1.5)] == pytest.approx([0.9, 0.7, 0.1, 0.1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "euler"}, "unknown flow method 'euler'"),
        ({"v": torch.zeros(3, 2)}, "x has shape"),
        ({"t": 0.0}, "t must lie in"),
        ({"t": 1.5}, "t must lie in"),
        ({"t": torch.full((2, 1, 1), 0.5)}, "t has shape"),
        ({"t": torch.full((2,), 0.5)}, "t has shape"),
        ({"d": 0.0}, "d must lie in"),
        ({"d": 0.6}, "d must not exceed t"),
        ({"noise_level": -0.1}, "noise_level"),
        ({"noise_level": math.nan}, "noise_level"),
        ({"method": "cps", "noise_level": 1.1}, "noise_level"),
        ({"method": "noise"}, "needs std"),
        ({"method": "noise", "std": torch.tensor(-0.1)}, "std must lie in"),
        ({"std_floor": -1.0}, "std_floor"),
    ],
)
def test_bad_arguments_of_a_step(changes: dict, words: str) -> None:
    arguments = {"x": torch.zeros(2, 3), "v": torch.zeros(2, 3), "t": 0.5, "d": 0.25, "method": "sde"}
    with pytest.raises(ValueError, match=words):
        step_distribution(**{**arguments, **changes})


def test_bad_arguments_of_the_other_functions() -> None:
    x = torch.zeros(2, 3)
    for call, words in (
        (lambda: time_grid(0), "steps"),
        (lambda: learned_std(x, 0.2, 0.1), "low <= high"),
        (lambda: anneal_noise_level(-1.0, 0.0, 0.0), "start"),
        (lambda: gaussian_log_prob(x, torch.zeros(3, 2), x), "mean"),
        (lambda: gaussian_log_prob(x, x, torch.zeros(4)), "std has shape"),
        (lambda: gaussian_log_prob(x, x, x - 1), "std must lie in"),
        (lambda: gaussian_kl(x, x, x, x + 1), "0 for the same elements"),
    ):
        with pytest.raises(ValueError, match=words):
            call()

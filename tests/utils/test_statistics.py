"""Wilson intervals against published and independently computed values."""

from __future__ import annotations

import math

import pytest

from rlvla.utils.statistics import wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_published_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("successes", "n"), [(3, 7), (90, 100), (1, 2)])
def test_bounds_solve_the_score_equation(successes: int, n: int) -> None:
    z = 1.959963984540054
    for bound in wilson_interval(successes, n):
        assert abs(successes / n - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / n), rel=1e-9)


def test_success_and_failure_are_mirror_images() -> None:
    low, high = wilson_interval(13, 40)
    assert wilson_interval(27, 40) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, n)

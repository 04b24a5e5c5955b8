"""Normalization modes, their inverses, and statistics that cannot be used."""

from __future__ import annotations

import numpy as np
import pytest

from rlvla.models.lerobot.config import STATISTICS
from rlvla.models.lerobot.processors import Normalizer, normalizer_problems

VALUES = {"mean": 1.0, "std": 2.0, "min": -1.0, "max": 3.0, "q01": 0.0, "q99": 4.0, "q10": 1.0, "q90": 2.0}
VECTORS = {name: np.full(2, value, np.float32) for name, value in VALUES.items()}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("IDENTITY", 3.0), ("MEAN_STD", 1.0), ("MIN_MAX", 1.0), ("QUANTILES", 0.5), ("QUANTILE10", 3.0)],
)
def test_modes(mode: str, expected: float) -> None:
    normalizer = Normalizer(mode, VECTORS)
    values = np.full((4, 2), 3.0)
    normalized = normalizer.normalize(values)
    assert normalized.dtype == np.float32
    np.testing.assert_allclose(normalized, expected)
    np.testing.assert_allclose(normalizer.unnormalize(normalized), values)


@pytest.mark.parametrize("mode", ["MIN_MAX", "QUANTILES", "QUANTILE10"])
def test_a_number_that_never_changes(mode: str) -> None:
    low, high = STATISTICS[mode]
    normalizer = Normalizer(mode, VECTORS | {low: VECTORS[high]})
    values = np.broadcast_to(VECTORS[high], (3, 2))
    np.testing.assert_array_equal(normalizer.normalize(values), -1)
    np.testing.assert_allclose(normalizer.unnormalize(np.zeros((3, 2))), values)


def test_problems() -> None:
    assert normalizer_problems("IDENTITY", None, 2) == []
    assert normalizer_problems("MEAN_STD", VECTORS, 2) == []
    assert "mean and std" in normalizer_problems("MEAN_STD", None, 2)[0]
    assert "q99" in normalizer_problems("QUANTILES", {"q01": VECTORS["q01"]}, 2)[0]
    assert len(normalizer_problems("MIN_MAX", VECTORS, 3)) == 2
    assert len(normalizer_problems("MIN_MAX", VECTORS | {"max": np.array([np.inf, 1.0])}, 2)) == 1

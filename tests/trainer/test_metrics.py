"""Weighted means over micro-batches and ranks."""

from __future__ import annotations

import pytest
import torch

from rlvla.trainer.metrics import MetricMeans


class Ranks:
    """Adds what other ranks reported."""

    def __init__(self, *others: MetricMeans):
        self._others = list(others)

    def all_reduce(self, values: dict[str, float], op: str) -> dict[str, float]:
        assert op == "sum"
        kind = "_sums" if not hasattr(self, "_second") else "_weights"
        self._second = True
        return {name: v + sum(getattr(o, kind)[name] for o in self._others) for name, v in values.items()}


def test_means_are_weighted_and_take_tensors() -> None:
    means = MetricMeans()
    means.add({"a": torch.tensor(2.0, requires_grad=True), "b": 1.0}, 3.0)
    means.add({"a": 6.0}, 1.0)
    assert means.reduce(Ranks()) == pytest.approx({"a": 3.0, "b": 1.0})


def test_weight_zero_ignores_the_value_but_keeps_the_name() -> None:
    means = MetricMeans()
    means.add({"a": float("nan")}, 0.0)
    assert means.reduce(Ranks()) == {}
    other = MetricMeans()
    other.add({"a": 4.0}, 2.0)
    assert means.reduce(Ranks(other)) == {"a": 4.0}


def test_ranks_count_by_weight() -> None:
    mine, other = MetricMeans(), MetricMeans()
    mine.add({"a": 1.0}, 3.0)
    other.add({"a": 5.0}, 1.0)
    assert mine.reduce(Ranks(other)) == {"a": 2.0}

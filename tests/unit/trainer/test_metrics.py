"""Every metric declares its reduction; the reduction is that over all entries of all ranks."""

from __future__ import annotations

import pytest
import torch

from rlvla.trainer.metrics import Metrics, explained_variance
from tests.support.metrics import reduced


def test_means_are_weighted_and_take_tensors() -> None:
    metrics = Metrics()
    metrics.mean({"a": torch.tensor(2.0, requires_grad=True), "b": 1.0}, 3.0)
    metrics.mean({"a": 6.0}, 1.0)
    assert reduced(metrics) == pytest.approx({"a": 3.0, "b": 1.0})


def test_weight_zero_ignores_the_value_but_keeps_the_name() -> None:
    metrics, other = Metrics(), Metrics()
    metrics.mean({"a": float("nan")}, 0.0)
    assert reduced(metrics) == {}
    other.mean({"a": 4.0}, 2.0)
    assert reduced(metrics, other) == {"a": 4.0}


def test_each_reduction_is_that_over_steps_and_ranks() -> None:
    first, second = Metrics(), Metrics()
    for metrics, values in ((first, (1.0, 5.0)), (second, (3.0, -2.0))):
        for value in values:
            metrics.mean({"mean": value}, 2.0)
            metrics.total({"total": value})
            metrics.maximum({"maximum": value})
            metrics.minimum({"minimum": value})
    second.mean({"mean": 7.0}, 4.0)
    wanted = {"mean": (2 * (1 + 5 + 3 - 2) + 28) / 12, "total": 7.0, "maximum": 5.0, "minimum": -2.0}
    assert reduced(first, second) == pytest.approx(wanted)


def test_the_order_of_declaration_does_not_matter() -> None:
    first, second = Metrics(), Metrics()
    first.total({"a": 1.0, "b": 2.0})
    second.total({"b": 3.0, "a": 4.0})
    assert reduced(first, second) == {"a": 5.0, "b": 5.0}


def test_a_name_has_one_reduction() -> None:
    metrics = Metrics()
    metrics.mean({"a": 1.0}, 1.0)
    with pytest.raises(ValueError, match="'a' was declared as mean before and as total now"):
        metrics.total({"a": 1.0})


def test_distributions_are_those_of_all_entries() -> None:
    entries, parts = torch.tensor([1.0, 2.0, 4.0, 9.0, -3.0]), [Metrics(), Metrics(), Metrics()]
    for metrics, own in zip(parts, (entries[:1], entries[1:], entries[:0])):
        metrics.distribution("x", own)
    wanted = {"x/mean": entries.mean(), "x/std": entries.std(correction=0), "x/max": 9.0, "x/min": -3.0}
    assert reduced(*parts) == pytest.approx({name: float(value) for name, value in wanted.items()})
    nothing = Metrics()
    nothing.distribution("x", entries[:0])
    assert reduced(nothing) == {}


def test_explained_variance_over_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(40, generator=generator)
    values = 0.7 * returns + 0.1 * torch.randn(40, generator=generator) + 3.0
    parts = [Metrics(), Metrics()]
    for metrics, own in zip(parts, (slice(0, 5), slice(5, 40))):
        metrics.distribution("returns", returns[own])
        metrics.distribution("_error", (returns - values)[own])
        metrics.derived("explained", explained_variance("returns", "_error"))
    wanted = 1 - (returns - values).var() / returns.var()
    assert reduced(*parts)["explained"] == pytest.approx(float(wanted), rel=1e-4)

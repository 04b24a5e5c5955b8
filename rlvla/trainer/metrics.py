"""Metrics of an iteration; the code that measures a metric also declares how it is reduced.

The reduction is the same over micro-batches, optimizer steps and ranks: a weighted mean, a sum, a maximum or a minimum.
Nothing is inferred from names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

Value = float | Tensor


class Collectives(Protocol):
    """The collective operation of the reduction."""

    def all_reduce(self, values: dict[str, float], op: str = "mean") -> dict[str, float]:
        """Reduce named numbers over the ranks."""
        ...


class Metrics:
    """Collects measurements; `reduce` turns them into one number per name.

    Names that start with `_` are intermediate values of derived metrics and are not reported.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._minima: dict[str, float] = {}
        self._derived: dict[str, Callable[[dict[str, float]], float]] = {}
        self._reduction: dict[str, str] = {}

    def mean(self, values: Mapping[str, Value], weight: float) -> None:
        """Add means over `weight` entries (tokens, rows, episodes, steps); they reduce to the mean over all entries.

        Args:
            values: name -> mean.
            weight: number of entries of the mean; with 0 the values are ignored and only the names are declared.
        """
        for name, value in values.items():
            self._declare(name, "mean")
            self._sums[name] = self._sums.get(name, 0.0) + (_number(value) * weight if weight else 0.0)
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def so_far(self, name: str) -> tuple[float, float]:
        """Sum and weight of a mean on this rank so far; zeros if nothing was measured."""
        return self._sums.get(name, 0.0), self._weights.get(name, 0.0)

    def total(self, values: Mapping[str, Value]) -> None:
        """Add numbers that reduce to their sum."""
        for name, value in values.items():
            self._declare(name, "total")
            self._totals[name] = self._totals.get(name, 0.0) + _number(value)

    def maximum(self, values: Mapping[str, Value]) -> None:
        """Add numbers that reduce to their maximum."""
        for name, value in values.items():
            self._declare(name, "maximum")
            self._maxima[name] = max(self._maxima.get(name, -float("inf")), _number(value))

    def minimum(self, values: Mapping[str, Value]) -> None:
        """Add numbers that reduce to their minimum."""
        for name, value in values.items():
            self._declare(name, "minimum")
            self._minima[name] = min(self._minima.get(name, float("inf")), _number(value))

    def distribution(self, name: str, entries: Tensor) -> None:
        """Add `name/mean`, `name/std` (ddof 0), `name/max` and `name/min` over entries [N]; N may be 0."""
        entries = entries.detach().double()
        some = len(entries) > 0
        self.mean({f"{name}/mean": entries.mean() if some else 0.0}, len(entries))
        self.mean({f"_{name}/square": entries.square().mean() if some else 0.0}, len(entries))
        self.maximum({f"{name}/max": entries.max() if some else -float("inf")})
        self.minimum({f"{name}/min": entries.min() if some else float("inf")})
        self.derived(f"{name}/std", lambda reduced: _variance(reduced, name) ** 0.5)

    def derived(self, name: str, function: Callable[[dict[str, float]], float]) -> None:
        """Declare a metric computed from reduced ones, in order of declaration; left out if one of them is missing."""
        self._declare(name, "derived")
        self._derived[name] = function

    def reduce(self, strategy: Collectives) -> dict[str, float]:
        """Reduce all measurements of all ranks to one number per name; all ranks must have declared the same names.

        Means and extremes without entries are left out.
        """
        sums = strategy.all_reduce(_sorted(self._sums), "sum")
        weights = strategy.all_reduce(_sorted(self._weights), "sum")
        reduced = {name: sums[name] / weights[name] for name in sums if weights[name]}
        reduced |= strategy.all_reduce(_sorted(self._totals), "sum")
        for extremes, op in ((self._maxima, "max"), (self._minima, "min")):
            values = strategy.all_reduce(_sorted(extremes), op)
            reduced |= {name: value for name, value in values.items() if abs(value) != float("inf")}
        for name, function in self._derived.items():
            with suppress(KeyError):
                reduced[name] = function(reduced)
        return {name: value for name, value in reduced.items() if not name.startswith("_")}

    def _declare(self, name: str, reduction: str) -> None:
        declared = self._reduction.setdefault(name, reduction)
        if declared != reduction:
            raise ValueError(f"metric '{name}' was declared as {declared} before and as {reduction} now")


def explained_variance(values: str, errors: str) -> Callable[[dict[str, float]], float]:
    """For `Metrics.derived`: 1 - Var(errors) / Var(values) of two distributions; 0 if the values do not vary."""

    def derive(reduced: dict[str, float]) -> float:
        total = _variance(reduced, values)
        return 1.0 - _variance(reduced, errors) / total if total > 1e-8 else 0.0

    return derive


def _variance(reduced: dict[str, float], name: str) -> float:
    return max(0.0, reduced[f"_{name}/square"] - reduced[f"{name}/mean"] ** 2)


def _sorted(values: dict[str, float]) -> dict[str, float]:
    """Sorted by name, an order shared by all ranks."""
    return dict(sorted(values.items()))


def _number(value: Value) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)

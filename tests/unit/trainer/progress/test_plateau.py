"""A plateau is announced where success does not rise, and hardly ever where it does; the causes follow the metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from rlvla.trainer.progress.plateau import (
    FALSE_ALARM,
    SMALLEST_GAIN,
    Plateau,
    find_plateau,
    likely_causes,
    window_of,
)

RUNS = 400
EPISODES, ITERATIONS = 128, 48
WINDOW = window_of(EPISODES)
LOOKS = ITERATIONS // WINDOW - 1


def share_with_alarm(rate: Callable[[int], float], *, group: int = 1, seed: int = 0) -> float:
    """Share of simulated runs in which a plateau is announced; the episodes of a `group` share their initial state.

    The success probability of a state is drawn from a beta distribution with mean `rate`, so that the episodes of a
    group are correlated (1/3).
    """
    rng, alarms = np.random.default_rng(seed), 0
    means = np.array([rate(iteration) for iteration in range(ITERATIONS)])
    for _ in range(RUNS):
        states = np.repeat(means[:, None], EPISODES // group, axis=1)
        if group > 1:
            states = rng.beta(2 * states + 1e-9, 2 * (1 - states) + 1e-9)
        counts = [(float(s), float(EPISODES)) for s in rng.binomial(group, states).sum(1)]
        looks = range(2 * WINDOW, ITERATIONS + 1, WINDOW)
        alarms += any(find_plateau(counts[:look], WINDOW, LOOKS) for look in looks)
    return alarms / RUNS


def rising(start: float) -> Callable[[int], float]:
    """A rise by the smallest gain in every window, which must not be called a plateau."""
    angle = math.asin(math.sqrt(start))
    return lambda iteration: math.sin(min(math.pi / 2, angle + SMALLEST_GAIN * iteration / WINDOW)) ** 2


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("start", [0.02, 0.1, 0.4])
def test_runs_that_gain_are_hardly_ever_called_plateaus(start: float, group: int) -> None:
    share = share_with_alarm(rising(start), group=group)
    assert share <= FALSE_ALARM + 2 * math.sqrt(FALSE_ALARM / RUNS), "more false alarms than stated"


@pytest.mark.parametrize(("success", "group", "least"), [(0.03, 1, 0.9), (0.5, 1, 0.9), (1.0, 1, 0.9), (0.3, 8, 0.5)])
def test_plateaus_are_noticed(success: float, group: int, least: float) -> None:
    assert share_with_alarm(lambda _: success, group=group) >= least


def test_too_little_evidence_is_no_plateau() -> None:
    flat = [(2.0, 4.0)] * 10
    assert find_plateau(flat, 5, 1) is None and find_plateau([(64.0, 128.0)] * 15, 8, 1) is None
    assert find_plateau([(0.0, 0.0)] * 16, 8, 1) is None


def test_both_rates_and_the_excluded_gain_are_named() -> None:
    counts = [(60.0, 128.0), (68.0, 128.0)] * 8
    plateau = find_plateau(counts, 8, 1)
    assert plateau is not None and plateau.before == plateau.now == 0.5 and 0.5 < plateau.most < 0.6
    fallen = find_plateau([(100.0, 128.0)] * 8 + [(40.0, 128.0)] * 8, 8, 1)
    assert fallen is not None and fallen.now == 40 / 128 and "no gain" in str(fallen)
    assert isinstance(fallen, Plateau)


HEALTHY = {
    "rollout/success_at_end": 0.4,
    "rollout/signal_share": 0.6,
    "actor/entropy": 0.7,
    "first_entropy": 0.8,
    "actor/ppo_kl": 2e-3,
    "actor/pg_clipfrac": 0.03,
    "critic/vf_explained_var": 0.5,
}


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, ["unknown"]),
        ({"rollout/success_at_end": 0.98, "rollout/signal_share": 0.02}, ["ceiling"]),
        ({"rollout/signal_share": 0.03}, ["signal"]),
        ({"actor/entropy": 0.02}, ["entropy"]),
        ({"actor/ppo_kl": -2e-6, "actor/pg_clipfrac": 0.0}, ["step_too_small"]),
        ({"actor/pg_clipfrac": 0.45}, ["step_too_large"]),
        ({"critic/vf_explained_var": -0.3}, ["critic"]),
        ({"rollout/signal_share": 0.05, "critic/vf_explained_var": 0.0}, ["signal", "critic"]),
        ({"actor/entropy": math.nan, "actor/ppo_kl": math.nan}, ["unknown"]),
    ],
)
@pytest.mark.parametrize("groups", [True, False])
def test_causes_follow_from_the_metrics(changed: dict, names: list[str], groups: bool) -> None:
    assert list(likely_causes(HEALTHY | changed, groups=groups)) == names
    assert list(likely_causes({}, groups=groups)) == ["unknown"]


@pytest.mark.parametrize(
    ("first", "now", "names"),
    [
        (0.22, -0.19, ["unknown"]),  # standard deviations from 0.3 to 0.2
        (0.22, -2.3, ["entropy"]),  # to 0.024
        (-1.0, -3.5, ["entropy"]),
        (-1.0, -0.5, ["unknown"]),
    ],
)
def test_a_density_has_collapsed_when_it_is_much_narrower(first: float, now: float, names: list[str]) -> None:
    facts = HEALTHY | {"first_entropy": first, "actor/entropy": now}
    assert list(likely_causes(facts, groups=False, densities=True)) == names

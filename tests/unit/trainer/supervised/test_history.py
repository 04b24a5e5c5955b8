"""When supervised training is measured, which measurement is the best, and when it is time to stop."""

from __future__ import annotations

import pytest

from rlvla.evaluation.results import Rate
from rlvla.trainer.supervised.validation import History, Measurement, Quality, measured_steps, played_steps, since_best


def measurement(step: int, loss: float | None = None, successes: int | None = None) -> Measurement:
    heldout = None if loss is None else Quality(loss, 0.5)
    success = None if successes is None else Rate.of([i < successes for i in range(20)])
    return Measurement(step, step / 10, Quality(1.0, 0.5), heldout, success)


def history(patience: int, *points: Measurement) -> History:
    kept = History(patience)
    for point in points:
        kept.add(point)
    return kept


def test_success_decides_and_the_loss_breaks_ties() -> None:
    points = [measurement(0, 0.1), measurement(10, 2.0, 4), measurement(20, 1.0, 4), measurement(30, 0.5, 3)]
    assert history(0, *points).best is points[2]
    assert history(0, *points, measurement(40, 0.2)).best is points[2], "episodes were not played there"
    losses = [measurement(0, 0.1), measurement(10, 2.0), measurement(20, 1.0), measurement(30, 1.5)]
    assert history(0, *losses).best is losses[2], "the initial policy is not a result of training"
    assert history(0, measurement(10)).best is None and history(0).best is None


def test_a_new_best_is_reported_as_it_is_added() -> None:
    kept = History()
    assert [kept.add(measurement(step, loss)) for step, loss in ((0, 3), (1, 2), (2, 1), (3, 1.5))] == [0, 1, 1, 0]


def test_training_stops_only_when_nothing_improves() -> None:
    losses = [measurement(step, loss) for step, loss in enumerate([3, 2, 1, 1.1, 1.2, 1.3])]
    assert not history(4, *losses).exhausted and history(3, *losses).exhausted and not history(0, *losses).exhausted
    improving = [measurement(step, 1.0 + step, step) for step in range(6)]
    assert not history(2, *improving).exhausted, "the loss rises, success does too"
    settled = [measurement(step, 1.0 + step, min(step, 3)) for step in range(6)]
    assert history(2, *settled).exhausted
    assert not history(2).exhausted and not history(1, measurement(0)).exhausted, "nothing to improve was measured"


@pytest.mark.parametrize(
    ("values", "tolerance", "waited"),
    [
        ([], 0.0, 0),
        ([1.0], 0.0, 0),
        ([1.0, 1.0, 1.0], 0.0, 2),
        ([1.0, 0.99, 0.98], 0.05, 2),
        ([-1, -2, -2.001], 0.01, 1),
    ],
)
def test_gains_below_the_tolerance_do_not_count(values: list[float], tolerance: float, waited: int) -> None:
    assert since_best(values, tolerance) == waited


def test_about_five_to_twenty_measurements() -> None:
    assert measured_steps(80, 10, None) == set(range(0, 81, 10))
    assert measured_steps(1000, 10, None) == set(range(0, 1001, 50))
    assert measured_steps(20, 10, None) == {0, 4, 8, 12, 16, 20}
    assert measured_steps(3, 3, None) == {0, 1, 2, 3}
    assert measured_steps(25, 5, 10) == {0, 10, 20, 25}
    for epochs in range(1, 200):
        assert 6 <= len(measured_steps(100 * epochs, 100, None)) <= 22


def test_episodes_are_played_every_so_many_epochs_and_at_the_end() -> None:
    assert played_steps(50, 10, 2) == {20, 40, 50}
    assert played_steps(20, 10, 0.25) == {2, 4, 6, 8, 10, 12, 14, 16, 18, 20}
    assert played_steps(20, 10, 0.001) == set(range(1, 21)) and played_steps(20, 10, 0) == set()

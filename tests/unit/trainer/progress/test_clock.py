"""The time left of a run, from durations of iterations, evaluations and checkpoints."""

from __future__ import annotations

import pytest

from rlvla.trainer.progress.report import RunClock


class Watch:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_known_before_the_first_iteration() -> None:
    assert RunClock(10, 0).left(0) is None


def test_iterations_evaluations_and_checkpoints_are_extrapolated() -> None:
    watch = Watch()
    clock = RunClock(10, 4, watch)
    watch.now += 50  # loading
    clock.evaluation(30.0)
    watch.now += 20
    clock.iteration(20.0)
    # nine iterations, evaluations after 4 and 8 and at the end
    assert clock.left(1) == pytest.approx(9 * 20 + 3 * 30)
    watch.now += 12  # 10 of them for the iteration, 2 for a checkpoint before it
    clock.iteration(10.0)
    assert clock.left(2) == pytest.approx(8 * (10 + 2 / 2) + 3 * 30), "the slow first iteration no longer counts"
    watch.now += 10
    clock.iteration(10.0)
    watch.now += 10
    clock.iteration(10.0)
    watch.now += 6
    clock.evaluation(6.0)
    assert clock.left(4) == pytest.approx(6 * (10 + 2 / 4) + 2 * 6)
    assert clock.left(10) == pytest.approx(6), "the last evaluation is still to come"


def test_a_resumed_run_counts_from_where_it_is() -> None:
    clock = RunClock(100, 0, Watch())
    clock.iteration(3.0)
    assert clock.left(91) == pytest.approx(27)


def test_the_countdown_follows_the_clock() -> None:
    watch = Watch()
    clock = RunClock(4, 2, watch)
    assert clock.countdown(0) is None
    clock.evaluation(5.0)
    for _ in range(2):
        watch.now += 10
        clock.iteration(10.0)
    assert clock.countdown(2) == clock.left(2) == pytest.approx(2 * 10 + 5)
    clock.begin_evaluation()
    assert clock.countdown(2) == pytest.approx(2 * 10 + 5 + 5), "the one under way comes before the rest"
    watch.now += 4
    assert clock.countdown(2) == pytest.approx(26)
    watch.now += 1
    clock.evaluation(5.0)
    watch.now += 3
    assert clock.countdown(2) == pytest.approx(22)
    clock.begin_evaluation(last=True)
    assert clock.countdown(2) == pytest.approx(5 - 3), "a run may end before its last iteration"
    watch.now += 100
    assert clock.countdown(2) == 0


def test_the_last_evaluation_is_counted_once() -> None:
    watch = Watch()
    clock = RunClock(1, 0, watch)
    clock.evaluation(5.0)
    watch.now += 10
    clock.iteration(10.0)
    assert clock.countdown(1) == pytest.approx(5)
    clock.begin_evaluation(last=True)
    assert clock.countdown(1) == pytest.approx(5)

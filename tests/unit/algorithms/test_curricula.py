"""Curricula over tasks: the means of success, and the shares made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from rlvla.algorithms import curricula
from rlvla.algorithms.curricula import TaskSuccess, register_task_sampling, task_shares
from rlvla.options import Options, arg


def slow_means(blocks: list[list[bool]], horizon: float) -> float:
    """The exponential mean of block means, outcome by outcome."""
    mean = None
    for block in blocks:
        average = sum(block) / len(block)
        if mean is None:
            mean = average
            continue
        for _ in block:  # each draws the mean towards that of its block
            mean = average + math.exp(-1.0 / horizon) * (mean - average)
    return mean


def test_means_forget_what_is_long_ago() -> None:
    rng = np.random.default_rng(0)
    blocks = [(rng.random(rng.integers(1, 9)) < 0.1 * i).tolist() for i in range(10)]
    success = TaskSuccess.unknown(3, horizon=8.0)
    for block in blocks:
        success.observe(1, block)
    assert success.recent[1] == pytest.approx(slow_means(blocks, 8.0), abs=1e-12)
    assert success.earlier[1] == pytest.approx(slow_means(blocks, 32.0), abs=1e-12)
    assert success.recent[1] > success.earlier[1], "it has been rising"
    assert success.episodes.tolist() == [0, sum(map(len, blocks)), 0] and success.recent[[0, 2]].tolist() == [0, 0]


def known(*recent: float, earlier: tuple[float, ...] | None = None) -> TaskSuccess:
    made = TaskSuccess.unknown(len(recent), 10.0)
    made.recent[:], made.earlier[:], made.episodes[:] = recent, earlier or recent, 5
    return made


def shares(name: str, success: TaskSuccess, floor: float = 0.1, factors: list[float] | None = None) -> list[float]:
    return task_shares(name, success, np.array(factors or [1.0] * len(success.recent)), floor).tolist()


def test_shares_of_failures() -> None:
    found = shares("inverse_success", known(0.0, 0.5, 1.0))
    assert found == pytest.approx([0.9 * 2 / 3 + 0.1 / 3, 0.9 / 3 + 0.1 / 3, 0.1 / 3]) and sum(found) == pytest.approx(
        1
    )
    assert shares("inverse_success", known(1.0, 1.0)) == [0.5, 0.5], "all weights are 0"
    assert shares("inverse_success", known(0.0, 1.0), factors=[0.0, 2.0]) == [0.0, 1.0]


def test_progress_counts_in_both_directions() -> None:
    found = shares("learning_progress", known(0.5, 0.2, 0.9, earlier=(0.3, 0.4, 0.9)))
    assert found == pytest.approx([0.45 + 0.1 / 3, 0.45 + 0.1 / 3, 0.1 / 3])


def test_a_task_that_was_never_played_weighs_at_least_as_much_as_the_heaviest() -> None:
    success = known(0.9, 0.6, 0.0)
    success.episodes[2] = 0
    assert shares("inverse_success", success, floor=1e-9) == pytest.approx([0.1 / 1.5, 0.4 / 1.5, 1.0 / 1.5])
    success = known(0.9, 0.6, 0.0, earlier=(0.9, 0.5, 0.0))
    success.episodes[2] = 0
    assert shares("learning_progress", success, floor=1e-9) == pytest.approx([0.0, 0.5, 0.5], abs=1e-6)
    solved = known(1.0, 1.0, 0.0)
    solved.episodes[2] = 0
    assert shares("inverse_success", solved, floor=1e-9) == pytest.approx([0.0, 0.0, 1.0], abs=1e-6)


def test_one_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curricula.TASK_SAMPLINGS, "_entries", dict(curricula.TASK_SAMPLINGS._entries))

    @register_task_sampling("hardest")
    def hardest(success: TaskSuccess) -> np.ndarray:
        return (success.recent == success.recent.min()).astype(float)

    assert {"uniform", "hardest"} <= set(curricula.TASK_SAMPLINGS.names())

    @dataclass(frozen=True)
    class Target(Options):
        target: float = arg(0.5, "success rate")

    @register_task_sampling("near", options=Target)
    def near(success: TaskSuccess, *, target: float = 0.5) -> np.ndarray:
        return 1.0 - np.abs(success.recent - target)

    one = np.ones(2)
    assert task_shares("near", known(1.0, 0.5), one, 0.5).tolist() == pytest.approx([5 / 12, 7 / 12])
    assert task_shares("near", known(1.0, 0.5), one, 0.5, Target(1.0)).tolist() == pytest.approx([7 / 12, 5 / 12])
    assert shares("hardest", known(0.4, 0.1), floor=0.2) == pytest.approx([0.1, 0.9])

    @register_task_sampling("broken")
    def broken(success: TaskSuccess) -> np.ndarray:
        return np.array([1.0, -1.0])

    with pytest.raises(ValueError, match="2 finite weights"):
        shares("broken", known(0.4, 0.1))

    @register_task_sampling("raising")
    def raising(success: TaskSuccess) -> np.ndarray:
        return success.means

    with pytest.raises(ValueError, match="'raising' failed") as found:
        shares("raising", known(0.4, 0.1))
    assert isinstance(found.value.__cause__, AttributeError)
    with pytest.raises(ValueError, match="unknown task sampling"):
        shares("none", known(0.4, 0.1))

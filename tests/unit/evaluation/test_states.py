"""Grids of initial states."""

from __future__ import annotations

from dataclasses import replace

from rlvla.envs import list_tasks
from rlvla.evaluation import states
from rlvla.evaluation.report_page import solved, won_and_lost
from rlvla.evaluation.results import EpisodeOutcome, EvalResult, summarize

TOY = list_tasks("toy_reach")[0]
TASKS = [TOY, replace(TOY, task_id=1, name="other")]


def result(*successes: str, samples: int = 1) -> EvalResult:
    """Outcomes of each task, "1" for success; the samples of a state follow each other."""
    outcomes = [
        EpisodeOutcome(task, i // samples, s == "1", True, 5, sample=i % samples)
        for task, row in enumerate(successes)
        for i, s in enumerate(row)
    ]
    return summarize(outcomes, TASKS[: len(successes)], "heldout", samples == 1, samples=samples)


def test_each_state_is_won_lost_or_alike() -> None:
    grid = won_and_lost(result("1100", "1"), result("1010", "0"))
    assert grid.rows == {
        "reach": [(0, "both"), (1, "won"), (2, "lost"), (3, "neither")],
        "other": [(0, "won")],
    }
    assert {kind: count for kind, _, _, count in grid.legend} == {"won": 2, "lost": 1, "both": 1, "neither": 1}


def test_only_common_states_count() -> None:
    assert won_and_lost(result("111"), result("0")).rows == {"reach": [(0, "won")]}


def test_several_samples_of_a_state() -> None:
    grid = solved(result("110100", samples=2))
    assert grid.rows == {"reach": [(0, "both"), (1, "partly"), (2, "neither")]}


def test_too_many_states_are_left_out(monkeypatch) -> None:
    monkeypatch.setattr(states, "_MOST_CELLS", 2)
    assert solved(result("11")) is not None and solved(result("111")) is None

"""A run ends early only when several large enough evaluations in a row are good enough."""

from __future__ import annotations

import pytest

from rlvla.commands.ppo_checks import early_stopping_problems
from rlvla.evaluation.results import EvalResult, Rate
from rlvla.rollout.config import TaskSamplingConfig
from rlvla.trainer.config import ScheduleConfig
from rlvla.trainer.guards import good_enough
from rlvla.utils.cli.flags import no_effect_problems


def results(rates: list[float], n: int) -> list[EvalResult]:
    made = []
    for rate in rates:
        outcome = Rate.of([True] * round(rate * n) + [False] * (n - round(rate * n)))
        made.append(EvalResult("heldout", True, outcome, outcome, 10.0, ()))
    return made


@pytest.mark.parametrize(
    ("rates", "n", "stops"),
    [
        ([0.96, 0.98, 0.95], 100, True),
        ([0.5, 0.96, 0.98, 0.96], 50, True),
        ([0.96, 0.98], 100, False),
        ([0.96, 0.98, 0.94], 100, False),
        ([0.96, 0.9, 0.98, 0.98], 100, False),
        ([1.0, 1.0, 1.0], 49, False),
    ],
)
def test_three_good_evaluations_in_a_row(rates: list[float], n: int, stops: bool) -> None:
    assert good_enough(results(rates, n), ScheduleConfig()) == stops


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({}, []),
        ({"early_stopping": True, "eval_steps": 2}, []),
        ({"early_stopping": True}, [("early_stopping", "needs_flag")]),
        ({"early_stopping": True, "eval_steps": 2, "eval_episodes": 20}, [("early_stopping", "too_few")]),
        ({"early_stopping": True, "early_stop_by": "sampled", "eval_episodes": 20}, []),
        ({"early_stopping": True, "early_stop_by": "either"}, [("early_stopping", "needs_flag")]),
        (
            {"early_stopping": True, "early_stop_by": "sampled", "early_stop_evaluations": 2},
            [("early_stop_evaluations", "no_effect")],
        ),
        (
            {"early_stopping": True, "eval_steps": 2, "early_stop_iterations": 2},
            [("early_stop_iterations", "no_effect")],
        ),
        (
            {"early_stop_success": 0.9, "early_stop_by": "sampled"},
            [("early_stop_success", "no_effect"), ("early_stop_by", "no_effect")],
        ),
        ({"plateau_iterations": 1}, [("plateau_iterations", "too_few")]),
        ({"plateau_iterations": 0}, []),
    ],
)
def test_settings_with_which_it_cannot_happen(options: dict, problems: list[tuple[str, str]]) -> None:
    schedule = ScheduleConfig(**options)
    listed = [*early_stopping_problems(schedule, num_tasks=2), *no_effect_problems([schedule], {}, ())]
    assert [(p.flag, p.reason) for p in listed] == problems


@pytest.mark.parametrize("how", [{"task_sampler": "mine.py:Mine"}, {"task_sampling": "inverse_success"}])
def test_sampled_success_is_not_judged_by_states_that_a_sampler_chooses(how: dict) -> None:
    schedule = ScheduleConfig(early_stopping=True, early_stop_by="sampled")
    (problem,) = early_stopping_problems(schedule, 2, TaskSamplingConfig(**how))
    assert (problem.flag, problem.reason) == ("early_stop_by", "contradiction")

"""Progress reports: a plateau once, the time left, early stopping; and the same after a resume."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch import nn

from rlvla.envs.config import SplitConfig
from rlvla.evaluation.results import EvalResult, Rate
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig, OptimizationConfig, PPOConfig, ScheduleConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.observers import Rollout
from rlvla.trainer.progress.report import Progress, lower_bound
from rlvla.utils.terminal import log
from tests.support.ranks import OneRank


@pytest.fixture
def said() -> Iterator[list[tuple[int, str]]]:
    """(level, text) of everything that is logged."""
    records: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    log.addHandler(handler)
    yield records
    log.removeHandler(handler)


def progress(folder: Path, *, batch: dict[str, Any] | None = None, frozen: int = 0, **schedule: Any) -> Progress:
    sizes = {"num_episodes": 4000, "rollout_batch_size": 100, "train_batch_size": 100} | (batch or {})
    parts = (BatchConfig(**sizes), AlgorithmConfig(), OptimizationConfig(freezing_actor_steps=frozen))
    config = PPOConfig(*parts, ScheduleConfig(**schedule), SplitConfig(), record=Mock())
    return Progress(config, OneRank(), folder, nn.Linear(2, 2), "simulator")


def play(run: Progress, rates: list[float], first: int = 1, **facts: float) -> dict[str, float]:
    """Iterations of 100 episodes with these shares of successes; returns the last metrics."""
    values: dict[str, float] = {}
    for iteration, rate in enumerate(rates, first):
        values = {"timing_s/iteration": 2.0, "rollout/episodes": 100.0, "rollout/states": 100.0}
        values |= {"rollout/success_at_end": rate, "rollout/signal_share": rate, **facts}
        run.after_update(values)
        run.measure(iteration, values)
        run.after_iteration(values)
    return values


def plateaus(said: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(level, text) for level, text in said if "no gain" in text]


def test_a_plateau_is_announced_once_with_cause_and_flags(tmp_path: Path, said: list) -> None:
    run = progress(tmp_path)
    play(run, [0.04, 0.03] * 9)
    assert not plateaus(said), "two windows of ten iterations are needed"
    play(run, [0.04, 0.03] * 11, first=19)
    ((level, text),) = plateaus(said)
    assert level == logging.WARNING and "likely cause: only 3.5 %" in text and "--reward" in text


def test_no_message_for_rising_runs_or_without_the_test(tmp_path: Path, said: list) -> None:
    play(progress(tmp_path), [0.02 + 0.02 * i for i in range(40)])
    play(progress(tmp_path, plateau_iterations=0), [0.03] * 40)
    play(progress(tmp_path, batch={"task_sampler": "curriculum.py:Curriculum"}), [0.03] * 40)
    play(progress(tmp_path, frozen=25), [0.03] * 40)
    assert not plateaus(said)


def test_at_the_ceiling_it_is_not_a_warning(tmp_path: Path, said: list) -> None:
    play(progress(tmp_path), [0.98] * 20)
    ((level, text),) = plateaus(said)
    assert level == logging.INFO and "--early_stopping" in text


@pytest.mark.parametrize("by", ["either", "evaluations", "sampled"])
def test_a_start_that_succeeds_is_not_trained(tmp_path: Path, by: str) -> None:
    """If a single evaluation suffices: that of the start, which must reach the threshold."""

    def end(successes: int, evaluations: int) -> str | None:
        options = {"early_stopping": True, "early_stop_by": by, "early_stop_evaluations": evaluations}
        rate = Rate.of([True] * successes + [False] * (100 - successes))
        result = EvalResult("heldout", True, rate, rate, 10.0, ())
        return progress(tmp_path, **options).good_enough([(0, result)], 0)

    assert (end(96, 1) is not None) == (by != "sampled")
    assert end(94, 1) is None and end(96, 3) is None


@pytest.mark.parametrize("break_at", [7, 15, 20, 30])
def test_a_resumed_run_reports_and_decides_the_same(tmp_path: Path, said: list, break_at: int) -> None:
    options: dict[str, Any] = {"early_stopping": True, "early_stop_by": "sampled", "early_stop_success": 0.6}
    rates = [0.3, 0.4] * 15 + [0.8] * 5
    whole = progress(tmp_path, **options)
    ends = [play(whole, [rate], first=i) and whole.good_enough([], i) for i, rate in enumerate(rates, 1)]
    assert plateaus(said) and ends[-1] is not None and not any(ends[:-2])
    once = list(plateaus(said))
    said.clear()

    first, second = progress(tmp_path, **options), progress(tmp_path, **options)
    resumed = [play(first, [rate], first=i) and first.good_enough([], i) for i, rate in enumerate(rates[:break_at], 1)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    later = enumerate(rates[break_at:], break_at + 1)
    resumed += [play(second, [rate], first=i) and second.good_enough([], i) for i, rate in later]
    assert resumed == ends and plateaus(said) == once
    assert second.state_dict() == whole.state_dict()


def test_a_checkpoint_of_an_earlier_version_has_no_state(tmp_path: Path) -> None:
    run = progress(tmp_path)
    run.load_state_dict(None)
    assert play(run, [0.5], first=31)["timing_s/left"] == pytest.approx(18.0, abs=0.5)


def test_the_time_left_is_in_line_and_bar(tmp_path: Path, said: list) -> None:
    run = progress(tmp_path)
    assert run.bar(1) == "iteration 1/40"
    values = play(run, [0.5])
    assert "1m18s left)" in run.line(1, values) and run.bar(2) == "iteration 2/40"
    assert said == []
    assert "moved 0," in run.line(1, values | {"critic/vf_loss": 0.5}) and "signal 0.50" in run.line(1, values)


def test_episodes_of_a_group_count_once() -> None:
    counts = [(76.0, 80.0)] * 5
    assert lower_bound(counts, states=400) > 0.92 > lower_bound(counts, states=50) > 0.8
    assert lower_bound([], states=0) == 0.0


@pytest.mark.parametrize(("estimator", "share"), [("grpo", 0.5), ("gae", 0.25)])
def test_the_signal_is_that_of_the_estimator(tmp_path: Path, estimator: str, share: float) -> None:
    config = PPOConfig(
        BatchConfig(n_samples_per_prompt=2, num_episodes=4, rollout_batch_size=2),
        AlgorithmConfig(advantage_estimator=estimator),
        OptimizationConfig(),
        ScheduleConfig(),
        SplitConfig(),
        record=Mock(),
    )
    run, metrics = Progress(config, OneRank(), tmp_path, nn.Linear(2, 2), "simulator"), Metrics()
    samples = [SimpleNamespace(uid=uid, score=score) for uid, score in [("a", 0), ("a", 1), ("b", 0), ("b", 0)]]
    run.after_rollout(Rollout(0, samples), metrics)
    values = metrics.reduce(OneRank())
    assert values == {"rollout/signal_share": share, "rollout/episodes": 4, "rollout/states": 2}

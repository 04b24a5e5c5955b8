"""Measurements of a rollout: rewards, components, numbers of reward sources; the line of an iteration."""

from __future__ import annotations

import numpy as np

from rlvla.data.rollouts import as_episode
from rlvla.rollout.stats import RolloutStats
from rlvla.trainer.measurements import iteration_line, measure_rollout
from rlvla.trainer.metrics import Metrics
from tests.support.experience import OneRank
from tests.support.reward_cases import make_sample


class WithAnotherRank(OneRank):
    """A rank whose peer reports another number."""

    def gather_objects(self, item):
        return [item, [["reward/success"], ["reward/reward_fn_elsewhere"]]]


def measured(samples, strategy) -> dict[str, float]:
    metrics = Metrics()
    measure_rollout(samples, RolloutStats(), metrics, strategy)
    return metrics.reduce(strategy)


def test_a_number_is_averaged_over_the_episodes_that_report_it() -> None:
    reports = [{"reward_fn_speed": 1.0}, {"reward_fn_speed": 2.0, "reward_fn_rare": 5.0}, {}]
    samples = [make_sample({"success": np.ones((1, 1))}, [1], reward_info=info) for info in reports]
    values = measured(samples, WithAnotherRank())
    assert (values["reward/reward_fn_speed"], values["reward/reward_fn_rare"]) == (1.5, 5.0)
    assert values["reward/success"] == 1.0 and "reward/reward_fn_elsewhere" not in values


def test_numbers_are_dumped() -> None:
    sample = make_sample({"success": np.ones((1, 1))}, [1], reward_info={"reward_fn_speed": 2.0})
    dumped = as_episode(sample, ["front"])["more"]
    assert float(dumped["rollout/reward_info/reward_fn_speed"]) == 2.0


def test_the_line_of_an_iteration_tells_the_reward_where_it_is_not_success() -> None:
    values = {"rollout/success_at_end": 0.5, "reward/total": 0.5, "timing_s/rollout": 1.0, "timing_s/update": 1.0}
    assert "success 0.50 (" in iteration_line(1, 2, values, {"success": 1.0})
    for weights in ({"success": 2.0}, {"success": 1.0, "rm": 0.5}, {"rm": 1.0}):
        assert "success 0.50, reward 0.5 (" in iteration_line(1, 2, values, weights)


def test_the_line_of_an_iteration_says_what_is_wrong_with_the_judge() -> None:
    fine = {"rollout/success_at_end": 0.5, "timing_s/rollout": 3.0, "timing_s/update": 1.0, "timing_s/rewards": 2.0}
    fine |= {f"reward/vlm_{name}": 0.0 for name in ("failures", "timeouts", "retries")} | {"reward/vlm_requests": 40.0}
    quiet = iteration_line(1, 2, fine)
    assert "vlm" not in quiet and "waited" not in quiet
    line = iteration_line(1, 2, {**fine, "reward/vlm_failures": 3.0, "reward/vlm_retries": 9.0})
    assert "vlm: 3 failures, 9 retries of 40 requests" in line
    assert "remote: 2 timeouts" in iteration_line(1, 2, {**fine, "reward/remote_timeouts": 2.0})
    assert "waited 3.5 s for rewards" in iteration_line(1, 2, {**fine, "timing_s/rewards": 3.5})

"""What is measured of a rollout: rewards, their components, and the numbers that reward sources report."""

from __future__ import annotations

import numpy as np

from rlvla.data.rollouts import as_episode
from rlvla.rollout.stats import RolloutStats
from rlvla.trainer.measurements import measure_rollout
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

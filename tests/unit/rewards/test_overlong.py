"""The penalty for the last steps before the step limit."""

from __future__ import annotations

import pytest

from rlvla.rewards import RewardConfig, RewardPlan
from rlvla.utils.errors import ConfigError
from tests.support.reward_cases import make_chunk, make_task, play

TASK = make_task()  # 100 steps


def penalty(steps: int, buffer: int = 20, factor: float = 0.5) -> tuple[float, list[float]]:
    plan = RewardPlan.from_config(RewardConfig.from_flags(overlong_buffer_len=buffer, overlong_penalty_factor=factor))
    sample, _ = play(plan, TASK, [make_chunk([set()] * steps, steps, truncated=True)])
    assert sample.reward_info["overlong_steps"] == max(0, steps - 80)
    return float(sample.reward_components["overlong"].sum()), sample.rewards[0].tolist()


def test_it_grows_linearly_to_the_limit() -> None:
    for steps, wanted in ((1, 0.0), (80, 0.0), (81, -0.025), (90, -0.25), (100, -0.5)):
        assert penalty(steps)[0] == pytest.approx(wanted)


def test_each_of_the_last_steps_bears_its_share() -> None:
    _, rewards = penalty(82)
    assert rewards[:80] == [0.0] * 80 and rewards[80:] == pytest.approx([-0.025, -0.025])


def test_flags_that_do_not_fit() -> None:
    plan = RewardPlan.from_config(RewardConfig.from_flags(overlong_buffer_len=101))
    assert [(p.flag, p.reason) for p in plan.problems([TASK])] == [("overlong_buffer_len", "out_of_range")]
    for config, wanted in (
        (RewardConfig.from_flags(overlong_penalty_factor=2.0), ("overlong_penalty_factor", "no_effect")),
        (RewardConfig(reward=("success", "overlong:1")), ("reward", "contradiction")),
    ):
        with pytest.raises(ConfigError) as error:
            RewardPlan.from_config(config)
        assert [(p.flag, p.reason) for p in error.value.problems] == [wanted]

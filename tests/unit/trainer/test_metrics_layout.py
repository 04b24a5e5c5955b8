"""Which scalars the charts of TensorBoard's Custom Scalars page take."""

from __future__ import annotations

import re

from rlvla.trainer.metrics_writer import ppo_layout


def taken(patterns: list[str], names: list[str]) -> list[str]:
    """As TensorBoard does it."""
    return [name for name in names if any(re.match(pattern, name) for pattern in patterns)]


def test_what_a_source_counts_is_no_reward() -> None:
    (chart,) = (c for title, c in ppo_layout(["success", "rm"])["does it learn?"].items() if title.startswith("reward"))
    paid = ["reward/total", "reward/success", "reward/rm"]
    counts = ["reward/success_regressions", "reward/rm_progress", "reward/vlm_failures", "critic/score/mean"]
    assert taken(chart, [*paid, *counts]) == paid


def test_a_reward_of_one_source_is_drawn_once() -> None:
    chart = ppo_layout(["success"])["does it learn?"]["reward per episode"]
    assert taken(chart, ["reward/total", "reward/success", "reward/success_regressions"]) == ["reward/total"]

"""`--desired_kl`: the peak of the learning-rate schedule follows the KL of the iterations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cli.train_ppo_vla import main
from rlvla.trainer.on_policy import adapted_scale
from tests.support import resume_cases


@pytest.mark.parametrize(
    ("kl", "fraction", "expected"),
    [
        (0.01, 1.0, 1.0),
        (0.019, 1.0, 1.0),
        (0.04, 1.0, 1 / 2),
        (0.36, 1.0, 1 / 4),
        (0.0051, 1.0, 1.0),
        (0.0036, 1.0, 5 / 3),
        (0.001, 1.0, 2.0),
        (-0.001, 1.0, 2.0),
        (0.0025, 0.5, 1.0),  # halfway through a decay a quarter of the KL is due
        (0.01, 0.5, 1 / 2),
        (0.0, 0.1, 1.0),
        (math.inf, 1.0, 1 / 4),
    ],
)
def test_the_scale_follows_the_kl(kl: float, fraction: float, expected: float) -> None:
    assert adapted_scale(1.0, kl, 0.01, fraction) == pytest.approx(expected)


def test_the_scale_is_limited() -> None:
    highest = lowest = 1.0
    for _ in range(20):
        highest, lowest = adapted_scale(highest, 0.0, 0.01, 1.0), adapted_scale(lowest, 1.0, 0.01, 1.0)
    assert (highest, lowest) == (10.0, 0.1)


def test_a_quadratic_kl_is_brought_near_the_desired_one() -> None:
    """A rate eight times too high is corrected in two iterations, one eight times too low in three."""
    for start, iterations in ((8.0, 2), (1 / 8, 3)):
        scale = 1.0
        for _ in range(iterations):
            scale = adapted_scale(scale, 0.01 * (start * scale) ** 2, 0.01, 1.0)
        assert start * scale == pytest.approx(1.0)


def rates_of(folder: Path, start: Path, *flags: str) -> list[float]:
    """Learning rates after each of two iterations."""
    common = ["--pretrain", str(start), "--save_path", str(folder), *resume_cases.COMMON]
    main([*common, "--lr_scheduler", "constant", "--num_episodes", "8", *flags])
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["actor/lr"] for line in lines if "actor/lr" in line]


def test_iterations_without_a_signal_do_not_raise_the_rate(policy_folder: Path, tmp_path: Path) -> None:
    """The first iteration has no successes and no reward, the second has rewards."""
    grpo = ["--advantage_estimator", "grpo", "--n_samples_per_prompt", "2", "--max_steps", "1"]
    rates = rates_of(tmp_path, policy_folder, *grpo, "--rollout_batch_size", "2", "--desired_kl", "100")
    assert rates == pytest.approx([1e-3, 2e-3])


@pytest.mark.parametrize(("desired", "factor"), [("1e-9", 1 / 4), ("100", 2.0)])
def test_the_rate_of_a_run_adapts(policy_folder: Path, tmp_path: Path, desired: str, factor: float) -> None:
    rates = {
        name: rates_of(tmp_path / name, policy_folder, "--share_backbone", *more)
        for name, more in (("plain", []), ("adapted", ["--desired_kl", desired]))
    }
    expected = [rate * max(factor ** (index + 1), 0.1) for index, rate in enumerate(rates["plain"])]
    assert rates["adapted"] == pytest.approx(expected)

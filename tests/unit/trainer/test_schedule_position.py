"""Learning rates of runs in which filters or `--target_kl` leave out optimizer steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.train_ppo_vla import main
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.schedules import scheduled
from tests.support import resume_cases

ITERATIONS, STEPS, PEAK = 3, 4, 1e-3  # of `resume_cases.COMMON`; steps per iteration
PPO = ["--critic_learning_rate", str(2 * PEAK)]
TARGET_KL = [*PPO, "--target_kl", "1e-12"]


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Learning rates of the optimizer steps; the critic is known by its peak rate."""
    taken: dict[str, list[float]] = {"actor": [], "critic": []}
    backward = Engine.backward

    def recording(self: Engine, loss: object, *, last: bool) -> float | None:
        if last:
            taken["critic" if self.peak_learning_rate == 2 * PEAK else "actor"].append(self.learning_rate)
        return backward(self, loss, last=last)

    monkeypatch.setattr(Engine, "backward", recording)
    return taken


def run(policy: Path, folder: Path, *more: str) -> list[float]:
    """The rates after each iteration."""
    flags = ["--pretrain", str(policy), "--save_path", str(folder), *resume_cases.COMMON, *more]
    main([*flags, "--eval_steps", "0"])
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["actor/lr"] for line in lines if "actor/lr" in line]


def planned(scheduler: str, warmup: float = 0.0) -> list[float]:
    total = ITERATIONS * STEPS
    return [PEAK * scheduled(scheduler, int(warmup * total), total, step) for step in range(total + 1)]


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_rates_are_unchanged_where_no_step_is_left_out(policy_folder: Path, tmp_path: Path, rates, scheduler) -> None:
    after = run(policy_folder, tmp_path, "--lr_scheduler", scheduler, "--lr_warmup_ratio", "0.25", *PPO)
    assert rates["actor"] == planned(scheduler, 0.25)[:-1], "to the bit"
    assert after == planned(scheduler, 0.25)[STEPS::STEPS]
    assert rates["critic"] == [2 * rate for rate in planned(scheduler, 0.25)[:-1]]


@pytest.mark.parametrize(("scheduler", "stage"), [("linear", "0"), ("cosine", "2")])
def test_target_kl_does_not_delay_the_schedule(policy_folder: Path, tmp_path: Path, rates, scheduler, stage) -> None:
    after = run(policy_folder, tmp_path, "--lr_scheduler", scheduler, "--zero_stage", stage, *TARGET_KL)
    assert ITERATIONS <= len(rates["actor"]) < ITERATIONS * STEPS, "some steps of the actor were left out"
    assert set(rates["actor"]) < set(planned(scheduler))
    assert after == planned(scheduler)[STEPS::STEPS] and after[-1] == 0.0
    assert rates["critic"] == [2 * rate for rate in planned(scheduler)[:-1]], "the critic takes all steps"


def test_dropped_groups_do_not_delay_the_schedule(policy_folder: Path, tmp_path: Path, rates) -> None:
    grpo = ["--advantage_estimator", "grpo", "--n_samples_per_prompt", "2", "--rollout_batch_size", "2"]
    after = run(policy_folder, tmp_path, *grpo, "--filter_zero_variance", "--max_rollout_rounds", "1")
    assert 0 < len(rates["actor"]) < ITERATIONS * STEPS
    assert after == planned("linear")[STEPS::STEPS]


def test_an_extended_run_continues_at_the_rate_of_its_schedule(policy_folder: Path, tmp_path: Path, rates) -> None:
    run(policy_folder, tmp_path, *PPO)
    taken = len(rates["actor"])
    run(policy_folder, tmp_path, *PPO, "--load_checkpoint", "--num_episodes", str(2 * 4 * ITERATIONS))
    total = 2 * ITERATIONS * STEPS
    expected = [PEAK * scheduled("linear", 0, total, step) for step in range(taken, total)]
    assert rates["actor"][taken:] == pytest.approx(expected) and expected[0] > 0.4 * PEAK


def test_a_resumed_run_continues_at_the_planned_rate(policy_folder: Path, tmp_path: Path, rates) -> None:
    more = ["--pretrain", str(policy_folder), *resume_cases.COMMON, *TARGET_KL, "--eval_steps", "0"]
    resume_cases.run(["--save_path", str(tmp_path), *more], stop_after=1)
    first = len(rates["actor"])
    resume_cases.run(["--save_path", str(tmp_path), *more, "--load_checkpoint"])
    assert first < STEPS and rates["actor"][first] == planned("linear")[STEPS]

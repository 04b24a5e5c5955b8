"""What a run that is ended before its time leaves behind: what it has learned, and a way to go on."""

from __future__ import annotations

import json
import math
from functools import wraps
from pathlib import Path

import pytest
import torch

from cli.train_ppo_vla import main as train
from rlvla.algorithms.policy_losses import POLICY_LOSSES
from rlvla.rollout import RolloutEngine
from rlvla.trainer.progress.report import RunClock
from rlvla.utils.files import read_metrics

FLAGS = [
    *("--advantage_estimator", "grpo", "--n_samples_per_prompt", "2", "--rollout_batch_size", "2"),
    *("--train_batch_size", "2", "--num_envs", "1", "--max_steps", "8", "--eval_episodes", "3", "--no-check_start"),
    *("--no-val_before_train", "--no-use_tensorboard", "--num_episodes", "12"),  # three iterations
]


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Every episode ends as the entry `success` says, and is paid for that alone."""
    wanted, play = {"success": False}, RolloutEngine.run

    def run(self: RolloutEngine, *args: object, **kw: object) -> list:
        samples = play(self, *args, **kw)
        for sample in samples:
            sample.success_once = sample.success_at_end = wanted["success"]
            sample.rewards.zero_()
            sample.rewards[-1, 0] = float(wanted["success"])
        return samples

    monkeypatch.setattr(RolloutEngine, "run", run)
    return wanted


def evaluations(folder: Path) -> list[tuple[int, float]]:
    recorded = json.loads((folder / "evaluations.json").read_text())
    return [(entry["iteration"], entry["success_at_end"]["rate"]) for entry in recorded]


def test_an_idle_run_is_ended_and_what_it_has_is_kept(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, outcomes: dict[str, bool]
) -> None:
    folder = tmp_path / "run"
    flags = ["--pretrain", str(policy_folder), "--save_path", str(folder), *FLAGS]
    with pytest.raises(SystemExit) as ended:
        train([*flags, "--max_idle_iterations", "2"])
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "in 2 iterations in a row all advantages were zero" in told and "Traceback" not in told
    assert f"Kept after iteration 2: the policy is in {folder / 'policy'}, the checkpoint is in" in told
    assert (folder / "policy" / "model.safetensors").is_file() and not (folder / "evaluations.json").exists()
    assert [r["total/episodes"] for r in read_metrics(folder)] == [4, 8], "the last iteration is logged as well"
    with pytest.raises(SystemExit):
        train(flags)
    assert f"{folder} already holds another run" in capsys.readouterr().err, "it is no mere beginning"
    train([*flags, "--load_checkpoint", "--max_idle_iterations", "0"])
    assert "continuing after iteration 2 of 3" in capsys.readouterr().out
    assert evaluations(folder) == [(3, 0.0)]


@pytest.mark.parametrize("filters", [[], ["--filter_accuracy", "--max_rollout_rounds", "1"]])
def test_a_run_that_always_succeeds_ends_well(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, outcomes: dict[str, bool], filters: list[str]
) -> None:
    outcomes["success"] = True
    folder = tmp_path / "run"
    flags = ["--pretrain", str(policy_folder), "--save_path", str(folder), *FLAGS, *filters]
    train([*flags, "--max_idle_iterations", "2"])
    assert "iteration 2: everything succeeds, nothing is left to learn" in capsys.readouterr().out
    assert evaluations(folder) == [(2, 1.0)] and (folder / "policy").is_dir()
    train([*flags, "--max_idle_iterations", "2", "--load_checkpoint"])
    assert evaluations(folder) == [(2, 1.0)], "it is still at its goal"
    train([*flags, "--max_idle_iterations", "3", "--load_checkpoint"])
    assert evaluations(folder) == [(3, 1.0)]


def test_the_last_iteration_is_evaluated_once_where_it_is_the_end(
    policy_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    outcomes: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run ends in the second of three iterations, in which an evaluation is due; it is done again if asked for."""
    outcomes["success"] = True
    folder = tmp_path / "run"
    flags = ["--pretrain", str(policy_folder), "--save_path", str(folder), *FLAGS, "--max_idle_iterations", "2"]
    said_last: list[bool] = []
    monkeypatch.setattr(RunClock, "begin_evaluation", lambda _, *, last=False: said_last.append(last))
    train([*flags, "--eval_steps", "1"])
    assert said_last == [False, True], "bars count the time left to the end of the second one"
    assert capsys.readouterr().out.count("iteration 2: evaluation") == 1
    assert evaluations(folder) == [(1, 1.0), (2, 1.0)]
    outcomes["success"] = False
    train([*flags, "--load_checkpoint"])
    assert ": evaluation, success" not in capsys.readouterr().out
    assert evaluations(folder) == [(1, 1.0), (2, 1.0)]
    train([*flags, "--load_checkpoint", "--val_only"])
    assert capsys.readouterr().out.count("iteration 2: evaluation") == 1
    assert evaluations(folder) == [(1, 1.0), (2, 0.0)], "the later one stands for the iteration"


def test_a_run_whose_steps_turn_bad_later_keeps_what_it_had(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halted in the middle of an iteration, after a step of it."""
    calls, get_policy_loss, folder = [], POLICY_LOSSES.get, tmp_path / "run"

    def turns_bad(name: str):
        loss = get_policy_loss(name)

        @wraps(loss)
        def wrapped(*args: object, **kw: object) -> tuple[torch.Tensor, dict]:
            calls.append(1)
            value, found = loss(*args, **kw)
            return value + 0.01 * args[0].sum() + (math.nan if len(calls) > 3 else 0.0), found

        return wrapped

    monkeypatch.setattr(POLICY_LOSSES, "get", turns_bad)
    flags = ["--pretrain", str(policy_folder), "--save_path", str(folder), *FLAGS, "--max_epochs", "1"]
    with pytest.raises(SystemExit) as ended:
        train([*flags, "--max_bad_steps", "1"])
    told = capsys.readouterr().err
    assert ended.value.code == 1 and len(calls) == 4
    assert "1 optimizer steps of the actor in a row had NaN" in told and "Kept after iteration 1" in told
    weights = torch.load(next((folder / "checkpoints").rglob("mp_rank_00_model_states.pt")), weights_only=False)
    assert all(value.isfinite().all() for value in weights["module"].values())
    monkeypatch.undo()
    train([*flags, "--load_checkpoint"])
    assert [iteration for iteration, _ in evaluations(folder)] == [3]

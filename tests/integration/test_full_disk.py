"""A run whose disk is full from its first iteration on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.train_ppo_vla import main as train
from cli.train_sac_vla import main as train_off_policy
from rlvla.checkpoints.training import list_checkpoints
from rlvla.models.actor import Actor
from rlvla.models.families import check_checkpoint
from rlvla.trainer.metrics_writer import MetricsLogger
from tests.support.disks import SmallDisk, needs_root, small_disk

pytestmark = needs_root


@pytest.fixture
def full_after() -> int:
    """The iteration after which the disk is full; overridden by tests."""
    return 1


@pytest.fixture
def disk(tmp_path: Path, full_after: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """It is full as soon as that iteration is logged."""
    log: Callable = MetricsLogger.log
    with small_disk(tmp_path / "small", "64m") as disk:

        def log_and_fill(self: MetricsLogger, metrics: dict[str, float], step: int) -> None:
            log(self, metrics, step)
            if step == full_after:
                disk.fill()

        monkeypatch.setattr(MetricsLogger, "log", log_and_fill)
        yield disk


def flags(policy: Path, disk: SmallDisk) -> list[str]:
    return [
        *("--pretrain", str(policy), "--save_path", str(disk.folder / "run"), "--num_episodes", "12"),
        *("--rollout_batch_size", "4", "--train_batch_size", "4", "--num_envs", "1", "--max_steps", "8"),
        *("--eval_episodes", "2", "--eval_steps", "2", "--save_steps", "1", "--no-val_before_train"),
        *("--dump_rollouts", "--no-check_start"),
    ]


def test_everything_goes_on_and_the_end_is_kept_elsewhere(
    policy_folder: Path, disk: SmallDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    train([*flags(policy_folder, disk), "--fallback_path", str(elsewhere)])
    printed, errors = capsys.readouterr()
    assert "iteration 3/3" in printed and "Traceback" not in errors
    for what in ("metrics.jsonl", "tensorboard", "rollouts"):
        assert errors.count(f"{what} ") <= 2 and f"run/{what}" in errors
    assert [path.name for path in list_checkpoints(elsewhere / "checkpoints")] == ["iteration_000003"]
    Actor.from_pretrained(elsewhere / "policy")
    assert f"--pretrain {elsewhere / 'policy'}" in printed, "the next command"
    disk.make_room()
    more = [*flags(policy_folder, disk), "--load_checkpoint", "--num_episodes", "16"]
    train([*more, "--ckpt_path", str(elsewhere / "checkpoints")])
    assert "continuing after iteration 3 of 4" in capsys.readouterr().out


def test_without_another_folder_the_last_lines_say_what_is_lost(
    policy_folder: Path, disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        train(flags(policy_folder, disk))
    printed, errors = capsys.readouterr()
    assert end.value.code == 1 and "Traceback" not in errors
    assert "success at end" in printed, "the evaluation was played and is shown"
    last = errors.splitlines()[-1]
    assert "could not write iteration_000003" in last and "the policy could not be written to" in last
    assert not list((disk.folder / "run" / "checkpoints").glob(".tmp*"))


OFF_POLICY = [
    *("--custom_module", "tests/support/state_reach.py", "--task_suite_name", "state_reach", "--num_envs", "1"),
    *("--hidden_sizes", "16", "--train_batch_size", "16", "--rollout_batch_size", "4", "--random_episodes", "4"),
    *("--num_episodes", "12", "--eval_episodes", "2", "--no-val_before_train", "--save_steps", "1"),
    *("--utd_ratio", "0.5", "--action_chunk_len", "3"),
]


@pytest.mark.parametrize("full_after", [2])
@pytest.mark.parametrize("images", [False, True], ids=["state", "images"])
def test_an_off_policy_run_keeps_its_policy_elsewhere(
    images: bool,
    disk: SmallDisk,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checkpoints need the replay buffer, which stays in the run folder: the last one that was complete counts."""
    elsewhere, run = tmp_path / "elsewhere", disk.folder / "run"
    more = ["--read_images", "--image_size", "64"] if images else []
    with pytest.raises(SystemExit) as end:
        train_off_policy([*OFF_POLICY, *more, "--save_path", str(run), "--fallback_path", str(elsewhere)])
    printed, errors = capsys.readouterr()
    assert end.value.code == 1 and "Traceback" not in errors
    assert "the replay buffer could not be saved to" in errors and f"the policy is in {elsewhere / 'policy'}" in errors
    assert ("the replay buffer cannot take the episodes" in errors) == images
    assert ("iteration 3/3" in printed) != images, "without images the buffer is in memory, and the run goes on"
    check_checkpoint(elsewhere / "policy").load_policy()
    disk.make_room()
    monkeypatch.undo()  # it is not filled again
    train_off_policy([*OFF_POLICY, *more, "--save_path", str(run), "--load_checkpoint"])
    printed = capsys.readouterr().out
    assert "continuing after iteration 1 of 3" in printed and "iteration 3/3" in printed

"""Run folders: leftovers of runs that ended early, and folders in use."""

from __future__ import annotations

import fcntl
import queue
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest

from rlvla.checkpoints.run_folder import checkpoint_folder_problem, claimed_run_folder, ended_early, run_folder_problem
from rlvla.utils.errors import ConfigError
from tests.support.launching import ROOT
from tests.support.ranks import ManyRanks, OneRank


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Files of a run before its first checkpoint, with an interrupted attempt at it."""
    folder = tmp_path / "run"
    for name in ("tensorboard", "start", "videos", "checkpoints/.tmp_iteration_000001"):
        (folder / name).mkdir(parents=True)
    for name in ("run_config.json", "metrics.jsonl", "tensorboard/events", ".config.yaml.part"):
        (folder / name).write_text("{}\n")
    (folder / "config.yaml").write_text("seed: 0\n")
    return folder


def test_a_run_that_ended_early_is_replaced(begun: Path, capsys: pytest.CaptureFixture) -> None:
    assert run_folder_problem(begun) is None
    with claimed_run_folder(begun, OneRank()):
        assert not [path for path in begun.iterdir() if not path.name.startswith(".")]
        (begun / "config.yaml").write_text("seed: 1\n")
    assert str(begun) in capsys.readouterr().out
    assert (begun / "config.yaml").read_text() == "seed: 1\n" and not (begun / ".running").exists()


@pytest.mark.parametrize(
    "kept",
    ["policy", "best_policy", "reward_model", "rollouts", "bad_batches", "notes.txt", "totals.json"]
    + ["checkpoints/iteration_000001", "checkpoints/damaged_iteration_000001"],
)
def test_folders_with_results_are_kept(begun: Path, kept: str) -> None:
    (begun / kept).mkdir()
    assert not ended_early(begun)
    assert "already holds another run" in str(run_folder_problem(begun))
    assert run_folder_problem(begun, resuming=True) is None
    with pytest.raises(ConfigError, match="already holds another run"), claimed_run_folder(begun, OneRank()):
        pass  # the other run may have ended since the folder was checked
    with claimed_run_folder(begun, OneRank(), resuming=True):
        pass
    assert (begun / kept).exists() and (begun / "metrics.jsonl").exists()


def test_a_run_killed_before_its_first_file_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / ".running").touch()
    assert run_folder_problem(tmp_path) is None
    with claimed_run_folder(tmp_path, OneRank()):
        pass
    assert capsys.readouterr().out == ""


def test_a_replacement_that_is_interrupted_can_be_repeated(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt), claimed_run_folder(begun, OneRank()):
        pass
    assert ended_early(begun) and run_folder_problem(begun) is None


def test_a_lock_of_a_file_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run before ends between opening and locking of its file."""
    lock, opened = fcntl.flock, []

    def after_the_end(file: IO[str], how: int) -> None:
        if not opened:
            opened.append(file)
            (tmp_path / ".running").unlink()
        lock(file, how)

    monkeypatch.setattr("fcntl.flock", after_the_end)
    with claimed_run_folder(tmp_path, OneRank()):
        assert (tmp_path / ".running").exists()
        assert "another process is training" in str(run_folder_problem(tmp_path))


def test_two_runs_share_no_folder_of_checkpoints(tmp_path: Path) -> None:
    with claimed_run_folder(tmp_path / "one", OneRank(), tmp_path / "checkpoints"):
        with (
            pytest.raises(ConfigError, match="another process is training in .*checkpoints"),
            claimed_run_folder(tmp_path / "two", OneRank(), tmp_path / "checkpoints"),
        ):
            pass
        with claimed_run_folder(tmp_path / "three", OneRank(), tmp_path / "three" / "checkpoints"):
            assert not (tmp_path / "three" / "checkpoints").exists()


def test_checkpoints_elsewhere_are_worth_keeping(begun: Path, tmp_path: Path) -> None:
    (begun / "config.yaml").write_text(f"ckpt_path: {tmp_path / 'other'}\n")
    assert ended_early(begun)
    (tmp_path / "other" / "iteration_000004").mkdir(parents=True)
    assert not ended_early(begun)
    assert checkpoint_folder_problem(tmp_path / "other") and not checkpoint_folder_problem(tmp_path / "new")


def test_checkpoints_in_the_fallback_folder_are_worth_keeping(begun: Path, tmp_path: Path) -> None:
    """The disk was full, and the run is resumed with --ckpt_path, perhaps from another working folder."""
    (begun / "config.yaml").write_text(f"fallback_path: {tmp_path / 'other'}\n")
    checkpoints = tmp_path / "other" / "checkpoints"
    assert ended_early(begun, checkpoints)
    (checkpoints / "iteration_000004").mkdir(parents=True)
    assert not ended_early(begun)
    (begun / "config.yaml").write_text("fallback_path: elsewhere\n")
    assert ended_early(begun) and not ended_early(begun, checkpoints)
    with claimed_run_folder(begun, OneRank(), checkpoints, resuming=True):
        assert (begun / "metrics.jsonl").exists()


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert not ended_early(tmp_path), "nothing marks it as a run's"
    assert "already holds another run" in str(run_folder_problem(tmp_path))
    assert "is a file" in str(run_folder_problem(tmp_path / "metrics.jsonl"))
    assert run_folder_problem(tmp_path / "new") is None


def test_a_run_that_is_under_way_keeps_its_folder(begun: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.support.ranks import OneRank\n"
    code += "from rlvla.checkpoints.run_folder import claimed_run_folder\n"
    code += "with claimed_run_folder(Path(sys.argv[1]), OneRank()):\n    print('claimed', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(begun)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert "replaced" in other.stdout.readline() and "claimed" in other.stdout.readline()
        (begun / "config.yaml").write_text("seed: 0\n")
        assert "another process is training" in str(run_folder_problem(begun))
        assert not ended_early(begun)
        with pytest.raises(ConfigError, match="another process"), claimed_run_folder(begun, OneRank()):
            pass
        other.send_signal(signal.SIGKILL)
    assert run_folder_problem(begun) is None, "a killed run holds nothing any longer"
    with claimed_run_folder(begun, OneRank(rank=1)):
        assert (begun / "config.yaml").exists(), "other ranks touch nothing"


def test_the_main_rank_claims_the_folder_after_every_rank_has_looked(tmp_path: Path) -> None:
    """A rank that is late finds the folder free, however long the main rank has been ready."""
    world, folder = ManyRanks(2), tmp_path / "run"
    events: queue.Queue[str] = queue.Queue()  # what the main rank has done
    world.on_arrival(lambda rank: events.put(f"rank {rank} waits"))

    def main_rank() -> None:
        with claimed_run_folder(folder, world.of(0)):
            events.put("claimed")

    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(main_rank)
        assert events.get(timeout=60) == "rank 0 waits"
        assert run_folder_problem(folder) is None and not folder.exists()
        with claimed_run_folder(folder, world.of(1)):
            claim.result(timeout=60)
    assert events.get() == "rank 1 waits" and events.get() == "claimed"

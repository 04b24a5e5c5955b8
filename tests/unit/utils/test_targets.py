"""Where nothing can be written is known before anything is started; what killed processes left is removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rlvla.utils import files
from rlvla.utils.files import atomic_path, output_folder_problem, remove_leftovers, target_problem


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_targets_that_can_be_written_leave_no_trace(tmp_path: Path, folder: bool) -> None:
    (tmp_path / "there").mkdir()
    before = contents(tmp_path)
    places = [tmp_path / "new", tmp_path / "a" / "b" / "c", tmp_path / "there" / "new"]
    for place in [*places, *([tmp_path / "there"] if folder else [])]:
        assert target_problem(place, folder=folder) is None
    assert contents(tmp_path) == before


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize(
    "place", ["file/below", "file/far/below", "n" * 300, "a/" + "n" * 300 + "/b", "null\0", "/proc/run", "/sys/run/a"]
)
def test_targets_that_cannot_be_written(tmp_path: Path, place: str, folder: bool) -> None:
    """Also as root, whom permissions do not stop."""
    (tmp_path / "file").touch()
    problem = target_problem(tmp_path / place, folder=folder)
    assert problem is not None and "\n" not in problem
    assert contents(tmp_path) == ["file"]
    if folder:
        assert output_folder_problem(tmp_path / place) is None, "the same is not reported twice"


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    assert "Read-only file system" in str(target_problem(tmp_path / "run", folder=True))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert target_problem(tmp_path, folder=False) is not None


def left_by_a_killed_process(path: Path) -> Path:
    """What `atomic_path` leaves if the process dies inside its block."""
    with atomic_path(path) as temporary:
        pass
    path.rename(temporary)
    os.utime(temporary, (0, 0))
    return temporary


def test_unfinished_files_are_removed_by_the_next_write(tmp_path: Path) -> None:
    left, other = left_by_a_killed_process(tmp_path / "a.json"), left_by_a_killed_process(tmp_path / "b.json")
    (tmp_path / ".a.json.mine").touch()
    with atomic_path(tmp_path / "a.json") as temporary:
        temporary.write_text("whole")
    assert not left.exists() and other.exists() and contents(tmp_path) == sorted([".a.json.mine", other.name, "a.json"])


def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "a.json") as first:
        first.write_text("first")
        os.utime(first, (0, 0))
        with atomic_path(tmp_path / "a.json") as second:
            second.write_text("second")
        remove_leftovers(tmp_path)
        assert first.exists(), "its lock tells"
    assert (tmp_path / "a.json").read_text() == "first"


def test_leftovers_of_a_run(tmp_path: Path) -> None:
    """Only ours: what a user hides in the folder stays."""
    left = [left_by_a_killed_process(tmp_path / name) for name in ("totals.json", "policy/config.json")]
    (tmp_path / ".policy.part").mkdir()
    (tmp_path / ".policy.part" / "model.safetensors").touch()
    (tmp_path / ".old_best_policy").mkdir()
    kept = [tmp_path / ".notes", tmp_path / ".git", tmp_path / "file.rlvla_part"]
    kept[0].touch(), kept[1].mkdir(), kept[2].touch()
    remove_leftovers(tmp_path)
    assert not any(path.exists() for path in (*left, tmp_path / ".policy.part", tmp_path / ".old_best_policy"))
    assert all(path.exists() for path in kept) and (tmp_path / "best_policy").is_dir()


def test_a_file_just_begun_is_left_alone(tmp_path: Path) -> None:
    fresh = left_by_a_killed_process(tmp_path / "a.json")
    os.utime(fresh, (time.time(), time.time()))
    remove_leftovers(tmp_path)
    assert fresh.exists()

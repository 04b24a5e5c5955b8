"""LeRobot datasets by repository id: found where LeRobot and the Hub keep them, never downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlvla.data.lerobot_cache import cache_folders, cached_dataset
from rlvla.data.lerobot_writing import write_lerobot
from rlvla.data.reading import data_files, read_demonstrations
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import is_repo_id, no_policy

Places = Callable[..., list[Path]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HF_HOME, and an empty working directory."""
    for name in ("HF_LEROBOT_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hf"


def holds(folder: Path) -> Path:
    (folder / "meta").mkdir(parents=True)
    (folder / "meta/info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["lerobot/pusht", "me/My_data-v2.1", "runs/demos"])
def test_names_of_repositories(name: str) -> None:
    assert is_repo_id(name)


@pytest.mark.parametrize(
    "name", ["pusht", "runs/demos.hdf5", "/data/pusht", "a/b/c", "../pusht", "a/b c", "a/b\n", "a/ü"]
)
def test_names_of_files(name: str) -> None:
    assert not is_repo_id(name)


def test_every_cache_is_searched(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = "datasets--me--toy/snapshots/abc"
    for place in (home / "hub" / snapshot, home / "lerobot/hub" / snapshot, home / "lerobot/me/toy"):  # later ones win
        assert holds(place) == cached_dataset("me/toy")
    assert cached_dataset("me/other") is None
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "robots"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert cached_dataset("me/toy") is None
    assert [str(place.relative_to(tmp_path)) for place in cache_folders("me/toy")] == [
        *("robots/me/toy", "robots/hub/datasets--me--toy", "cache/datasets--me--toy")
    ]


def test_of_several_snapshots_that_of_the_main_branch_is_read(home: Path) -> None:
    cache = home / "hub/datasets--me--toy"
    older, newer = (holds(cache / "snapshots" / name) for name in ("older", "newer"))
    os.utime(older, (1, 1))
    assert cached_dataset("me/toy") == newer
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("older")
    assert cached_dataset("me/toy") == older
    shutil.rmtree(older / "meta")  # fetched in part, of another branch
    assert cached_dataset("me/toy") == newer


def test_a_cached_dataset_is_read_by_its_name(demos_file: Path, home: Path) -> None:
    pytest.importorskip("av", reason="LeRobot datasets need the extra rlvla[lerobot]")
    pytest.importorskip("pyarrow", reason="LeRobot datasets need the extra rlvla[lerobot]")
    demos = read_demonstrations(demos_file)
    repository = home / "hub/datasets--me--toy"
    blobs, snapshot = repository / "blobs", repository / "snapshots/abc"
    write_lerobot(blobs, demos, 10.0)
    for file in (path for path in blobs.rglob("*") if path.is_file()):  # as the Hub's cache links them
        link = snapshot / file.relative_to(blobs)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    assert data_files(["me/toy"]) == ["me/toy"]
    cached = read_demonstrations("me/toy")
    assert cached.instructions == demos.instructions
    np.testing.assert_array_equal(np.concatenate(cached.actions), np.concatenate(demos.actions))
    holds(Path("me/toy"))  # a folder of that name here comes first
    with pytest.raises(ConfigError, match="me/toy"):
        read_demonstrations("me/toy")


def test_a_dataset_without_a_suite_is_named_after_the_repository(demos_file: Path, home: Path) -> None:
    pytest.importorskip("pyarrow", reason="LeRobot datasets need the extra rlvla[lerobot]")
    import json

    snapshot = home / "hub/datasets--me--toy/snapshots/abc"
    write_lerobot(snapshot, read_demonstrations(demos_file), 10.0)
    info = json.loads((snapshot / "meta/info.json").read_text())
    del info["rlvla"]
    (snapshot / "meta/info.json").write_text(json.dumps(info))
    assert read_demonstrations("me/toy").env_args["task_suite_name"] == "toy"


def test_the_error_names_the_searched_caches(home: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        read_demonstrations("lerobot/pusht")
    assert all(str(place) in str(raised.value) for place in cache_folders("lerobot/pusht"))
    assert "`hf download lerobot/pusht --repo-type dataset`" in str(raised.value)
    Path("runs").mkdir()
    for mistyped in ("runs/demos", "other/demos.hdf5"):
        with pytest.raises(ConfigError) as raised:
            read_demonstrations(mistyped)
        assert str(raised.value) == f"{mistyped} does not exist; make it with cli/collect_demos.py"


def test_a_policy_of_the_hub_is_downloaded_by_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "`hf download openvla/openvla-7b --local-dir openvla-7b` does that; then name openvla-7b" in no_policy(
        "openvla/openvla-7b"
    )
    (tmp_path / "runs").mkdir()
    for folder in ("runs/lift", "runs/lift/policy", "lift"):
        assert no_policy(folder).endswith("name the folder of a policy (config.json) or of a run"), folder

"""A downloaded folder neither leaks a file of this machine through a link nor stops a command with a pipe."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli import (
    check_demos,
    collect_demos,
    convert_demos,
    eval_vla,
    inspect_vla,
    push_to_hub,
    train_ppo_vla,
    train_sft_vla,
    view_data,
)
from rlvla.checkpoints.policy_folder import recorded_environment
from rlvla.data.lerobot_writing import write_lerobot
from rlvla.data.reading import read_demonstrations
from rlvla.models.families import check_checkpoint, policy_families
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import damage

SECRET = "-----BEGIN PRIVATE KEY-----"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def refused(capsys: pytest.CaptureFixture, main: Callable[..., Any], argv: list[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code  # some commands report what they find, with another code
    output = capsys.readouterr()
    text = " ".join((output.out + output.err).split())
    assert "Traceback" not in text
    return text


def policy_commands(policy: str, demos: str, out: Path) -> dict[str, tuple[Callable[..., Any], list[str]]]:
    run = ["--save_path", str(out / "run")]
    return {
        "sft": (train_sft_vla.main, ["--demos", demos, "--pretrain", policy, *run, "--no-use_tensorboard"]),
        "ppo": (train_ppo_vla.main, ["--pretrain", policy, *run]),
        "eval": (eval_vla.main, ["--pretrain", policy, "--num_envs", "1", "--eval_episodes", "2"]),
        "inspect": (inspect_vla.main, ["--pretrain", policy]),
        "collect": (collect_demos.main, ["--policy", policy, "--num_demos", "1", "--output", str(out / "new")]),
        "push": (push_to_hub.main, [policy, "--repo_id", "me/policy", "--dry_run"]),
    }


def data_commands(demos: str, out: Path) -> dict[str, tuple[Callable[..., Any], list[str]]]:
    return {
        "sft": (train_sft_vla.main, ["--demos", demos, "--save_path", str(out / "run")]),
        "check": (check_demos.main, [demos, "--output", str(out / "checked")]),
        "view": (view_data.main, [demos, "--output", str(out / "page.html")]),
        "convert": (convert_demos.main, ["--demos", demos, "--output", str(out / "copy"), "--format", "hdf5"]),
    }


@pytest.mark.parametrize("command", policy_commands("", "", Path()))
@pytest.mark.parametrize("name", ["vocab.txt", "model.safetensors", "text/notes.md", "pipe"])
def test_no_command_follows_a_link_out_of_a_policy_folder(
    policy_folder: Path,
    demos_file: Path,
    tmp_path: Path,
    secret: Path,
    capsys: pytest.CaptureFixture,
    command: str,
    name: str,
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(policy_folder, folder)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if name == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(os.path.relpath(secret, path.parent))
    error = refused(capsys, *policy_commands(str(folder), str(demos_file), tmp_path / "out")[command])
    reason = "is a pipe, socket or device" if name == "pipe" else f"is a link to {secret}, outside of {folder}"
    assert f"{path} {reason}" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", policy_families())
def test_no_family_reads_a_folder_with_a_link_that_leaves_it(tmp_path: Path, secret: Path, family: str) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "policy" / "vocab.txt").symlink_to(secret)
    with pytest.raises(ConfigError) as error:
        check_checkpoint(tmp_path / "policy")
    assert [(problem.flag, problem.reason) for problem in error.value.problems] == [(None, "leaves_folder")]


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "rlvla_environment.json"])
def test_a_pipe_stops_no_reader(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError):
        check_checkpoint(tmp_path)
    assert recorded_environment(tmp_path) == {}


@pytest.mark.parametrize("command", data_commands("", Path()))
@pytest.mark.parametrize("name", ["meta/tasks.parquet", "meta/notes.json", "data/chunk-000/file-001.parquet", "pipe"])
def test_no_command_follows_a_link_out_of_a_data_set(
    demos_file: Path, tmp_path: Path, secret: Path, capsys: pytest.CaptureFixture, command: str, name: str
) -> None:
    folder = tmp_path / "data"
    write_lerobot(folder, read_demonstrations(demos_file), 20.0)
    path = folder / name
    path.unlink(missing_ok=True)
    if name == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(secret)
    error = refused(capsys, *data_commands(str(folder), tmp_path / "out")[command])
    assert f"{path} is a " in error and ("pipe" if name == "pipe" else f"outside of {folder}") in error


@pytest.mark.parametrize("command", data_commands("", Path()))
def test_a_folder_of_hdf5_files_holds_them(
    demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture, command: str
) -> None:
    for name in ("demos.hdf5", "dataset_statistics.json"):
        folder = tmp_path / name.partition(".")[0]
        shutil.copytree(demos_file.parent, folder)
        (folder / name).unlink()
        (folder / name).symlink_to(demos_file.parent / name)
        error = refused(capsys, *data_commands(str(folder), tmp_path / "out")[command])
        assert f"{folder / name} is a link to {demos_file.parent / name}, outside of {folder}" in error


def test_a_checkpoint_with_a_link_is_damaged(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "iteration_000001"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"files": {"a.pt": {"bytes": len(SECRET), "sha256": "0"}}}))
    (folder / "a.pt").symlink_to(secret)
    assert "outside of" in str(damage(folder, checksums=False))


def test_a_policy_in_the_cache_of_hugging_face_is_trained(
    policy_folder: Path, demos_file: Path, tmp_path: Path, secret: Path
) -> None:
    """Its files are links to blobs; the trained policy holds files."""
    repository = tmp_path / "models--me--policy"
    snapshot = repository / "snapshots" / "0123abc"
    shutil.copytree(policy_folder, repository / "blobs")
    snapshot.mkdir(parents=True)
    for blob in (repository / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    run = ["--save_path", str(tmp_path / "run"), "--max_epochs", "1", "--no-use_tensorboard"]
    train_sft_vla.main(["--demos", str(demos_file), "--pretrain", str(snapshot), *run])
    trained = list((tmp_path / "run" / "policy").iterdir())
    assert trained and not any(path.is_symlink() for path in trained)
    push_to_hub.main([str(snapshot), "--repo_id", "me/policy", "--dry_run"])

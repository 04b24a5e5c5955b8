"""Files of folders from elsewhere: links stay inside, and only files are files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rlvla.utils.data_files import admit, inside
from rlvla.utils.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("private")
    folder = tmp_path / "policy"
    (folder / "below" / ".hidden").mkdir(parents=True)
    for name in ("config.json", "below/a.txt", "below/.hidden/b.txt"):
        (folder / name).write_text("{}")
    return folder


def refused(folder: Path, **options: bool) -> str:
    with pytest.raises(ConfigError) as error:
        admit(folder, **options)
    assert {(problem.flag, problem.reason) for problem in error.value.problems} == {(None, "leaves_folder")}
    return str(error.value)


def test_files_are_listed_at_any_depth(folder: Path) -> None:
    (folder / "same.json").symlink_to("config.json")
    (folder / "all").symlink_to("below")
    (folder / "nothing").symlink_to("missing")
    (folder / "loop").symlink_to("loop")
    names = [str(path.relative_to(folder)) for path in admit(folder)]
    assert names == ["below/.hidden/b.txt", "below/a.txt", "config.json", "same.json"]
    assert [path.name for path in admit(folder, below=False)] == ["config.json", "same.json"]
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert len(admit(link)) == 4, "the user names the folder, also by a link"


@pytest.mark.parametrize("name", ["vocab.txt", "below/vocab.txt", "below/.hidden/vocab.txt"])
@pytest.mark.parametrize("target", ["key", "", "missing"], ids=["file", "folder", "missing"])
@pytest.mark.parametrize("relative", [True, False])
def test_a_link_that_leaves_the_folder_is_refused(folder: Path, name: str, target: str, relative: bool) -> None:
    path, place = folder / name, folder.parent / "secret" / target
    path.symlink_to(os.path.relpath(place, path.parent) if relative else place)
    assert str(path) in refused(folder) and str(place) in refused(folder)
    with pytest.raises(ValueError, match="outside of"):
        inside(folder, name)


def test_a_chain_of_links_is_followed_to_its_end(folder: Path) -> None:
    (folder / "first").symlink_to("second")
    (folder / "second").symlink_to("below/third")
    (folder / "below" / "third").symlink_to("../../secret/key")
    assert refused(folder).count("outside of") == 3
    with pytest.raises(ValueError, match="outside of"):
        inside(folder, "first")


def test_a_path_through_a_linked_folder_is_refused(folder: Path) -> None:
    (folder / "data").symlink_to("../secret")
    with pytest.raises(ValueError, match="outside of"):
        inside(folder, "data/key")


def test_what_is_not_a_file_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "to_pipe").symlink_to("pipe")
    monkeypatch.chdir(folder)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as end:
        end.bind("socket")
        text = refused(folder)
    assert all(f"{folder / name} is a pipe, socket or device" in text for name in ("pipe", "socket", "to_pipe"))
    assert "/dev/zero, outside of" in text


def cached(hub: Path) -> Path:
    """A snapshot as `huggingface_hub` stores it."""
    repository = hub / "models--me--policy"
    snapshot = repository / "snapshots" / "0123abc"
    (snapshot / "text").mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name, up in (("config.json", "../.."), ("text/vocab.txt", "../../..")):
        (repository / "blobs" / Path(name).name).write_text("{}")
        (snapshot / name).symlink_to(f"{up}/blobs/{Path(name).name}")
    return snapshot


def test_snapshots_of_the_hugging_face_cache_are_read(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    assert [path.name for path in admit(snapshot)] == ["config.json", "vocab.txt"]
    assert [path.name for path in admit(snapshot / "text")] == ["vocab.txt"]
    assert inside(snapshot, "text/vocab.txt") == snapshot / "text" / "vocab.txt"


@pytest.mark.parametrize(
    "abuse", ["other repository", "beside the blobs", "linked blob", "linked blobs", "other names"]
)
def test_a_folder_that_looks_like_the_cache_leads_nowhere_else(tmp_path: Path, abuse: str) -> None:
    snapshot = cached(tmp_path)
    repository, key = snapshot.parents[1], tmp_path / "key"
    key.write_text("private")
    link = snapshot / "vocab.json"
    if abuse == "other repository":
        (tmp_path / "models--me--private" / "blobs").mkdir(parents=True)
        link.symlink_to("../../../models--me--private/blobs/key")
    elif abuse == "beside the blobs":
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0123abc")
        link.symlink_to("../../refs/main")
    elif abuse == "linked blob":
        (repository / "blobs" / "key").symlink_to(key)
        link.symlink_to("../../blobs/key")
    elif abuse == "linked blobs":
        (repository / "blobs").rename(repository / "before")
        (repository / "blobs").symlink_to(tmp_path)
        link.symlink_to("../../blobs/key")
    else:
        moved = tmp_path / "policies"
        repository.rename(moved)
        snapshot = moved / "snapshots" / "0123abc"
    assert "outside of" in refused(snapshot)

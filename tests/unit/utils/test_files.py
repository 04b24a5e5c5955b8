"""Output folders and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlvla.utils.files import (
    atomic_path,
    damage,
    manifest_entry,
    no_folder,
    output_folder_problem,
    read_lines,
    write_atomic,
    write_json,
    write_manifest,
)


def test_what_can_receive_a_run(tmp_path: Path) -> None:
    assert output_folder_problem(tmp_path / "new") is None
    assert output_folder_problem(tmp_path) is None, "an empty folder is fine"
    (tmp_path / "x").write_text("")
    assert output_folder_problem(tmp_path).endswith("already holds another run; name another folder or remove it")
    assert output_folder_problem(tmp_path, resuming=False).endswith("continue that run with --load_checkpoint")
    assert output_folder_problem(tmp_path, resuming=True) is None
    assert "is a file" in output_folder_problem(tmp_path / "x", resuming=True)


def test_a_missing_folder_is_told_with_what_is_nearly_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs/sft/policy").mkdir(parents=True)
    assert no_folder(tmp_path / "other/policy") == f"there is no folder {tmp_path / 'other/policy'}"
    monkeypatch.chdir(tmp_path)
    assert no_folder("runs/stf/policy").endswith(f"runs/stf/policy in {tmp_path}; did you mean runs/sft/policy?")
    assert no_folder("runs/stf/other").endswith(f"in {tmp_path}"), "there is no other in runs/sft"


def test_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert path.stat().st_mode & 0o777 == 0o644

    def crash(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"half")
    assert json.loads(path.read_text()) == {"a": 2}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "weights.bin"
    write_atomic(path, b"old")

    def half() -> None:
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"ne")
            assert path.read_bytes() == b"old"
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        half()
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o644


def test_only_records_of_a_step_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[1]\n{"step": "2"}\n{"a": 1}\n{"step": 3, "a"\n{"step": 4, "a": 1}\n')
    assert read_lines(path) == [{"step": 1}, {"step": 4, "a": 1}]


def test_a_manifest_notices_missing_short_and_changed_files(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    path = tmp_path / "actor" / "weights.pt"
    path.write_bytes(b"abc")
    assert "manifest.json is missing" in damage(tmp_path)
    write_manifest(tmp_path, {path: manifest_entry(path)})
    assert damage(tmp_path) is None
    path.write_bytes(b"abd")
    assert damage(tmp_path, checksums=False) is None and "actor/weights.pt has changed" in damage(tmp_path)
    path.write_bytes(b"ab")
    assert "has 2 bytes instead of 3" in damage(tmp_path, checksums=False)
    path.unlink()
    assert "actor/weights.pt is missing" in damage(tmp_path)

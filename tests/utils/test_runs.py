"""Output folders and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlvla.utils.runs import output_folder_problem, write_atomic, write_json


def test_what_can_receive_a_run(tmp_path: Path) -> None:
    assert output_folder_problem(tmp_path / "new") is None
    assert output_folder_problem(tmp_path) is None, "an empty folder is fine"
    (tmp_path / "x").write_text("")
    assert "already holds another run" in output_folder_problem(tmp_path)
    assert output_folder_problem(tmp_path, resuming=True) is None
    assert "is a file" in output_folder_problem(tmp_path / "x", resuming=True)


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

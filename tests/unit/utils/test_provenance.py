"""The commit that a run was trained with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlvla.utils.cli import config_file
from rlvla.utils.cli.config_file import quoted_head, write_config_file
from rlvla.utils.provenance import source_commit, source_words


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert source_commit(tmp_path) == commit
    source_commit.cache_clear()
    (tmp_path / "file").write_text("b")
    assert source_commit(tmp_path) == f"{commit}-dirty"
    (tmp_path / "site-packages").mkdir()
    assert source_commit(tmp_path / "site-packages") is None, "installed inside of somebody's repository"


def test_the_head_of_a_runs_flags_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, "source_words", lambda: "rlvla 9.8.7, commit abc")
    monkeypatch.setattr("sys.argv", ["cli/train.py", "--seed", "3"])
    assert quoted_head(tmp_path) == ("", "")
    write_config_file(tmp_path, [])
    assert quoted_head(tmp_path) == ("rlvla 9.8.7, commit abc", "python cli/train.py --seed 3")
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    assert quoted_head(tmp_path) == ("", "")
    assert source_words().startswith("rlvla ")

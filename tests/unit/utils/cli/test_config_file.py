"""Flags in a YAML file, and the header that records version, commit and command line."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlvla.utils.cli import config_file
from rlvla.utils.cli.config_file import (
    quoted_head,
    resolved_flags,
    source_commit,
    source_words,
    telling_flags,
    write_config_file,
)
from rlvla.utils.cli.flags import Parser, add_arguments, arg, from_namespace


@dataclass(frozen=True)
class Settings:
    rate: float = arg(1e-3, "a rate")
    offset: float | None = arg(None, "an offset (default: none)")
    names: tuple[str, ...] = arg(("a",), "names")
    clip: tuple[float, ...] = arg((), "widths")
    fast: bool = arg(True, "be fast")
    local_rank: int = arg(-1, "set by the launcher")


@dataclass(frozen=True)
class Places:
    demos: tuple[str, ...] = arg(("d",), "files")
    seed: int = arg(0, "a seed")


def parse(*argv: object) -> Settings:
    parser = Parser("what it does")
    add_arguments(parser, Settings, "settings")
    return from_namespace(Settings, parser.parse_args([str(word) for word in argv]))


def test_the_file_holds_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rate: 5e-6\noffset: -1e-3\nnames: [b, c]\nclip: [0.2, 0.28]\nfast: false\n")
    assert parse("--config", path) == Settings(5e-6, -1e-3, ("b", "c"), (0.2, 0.28), False)
    assert parse(f"--config={path}", "--rate", 1, "--fast", "--names", "z").rate == 1
    assert parse("--names", "z", "--config", path, "--fast").names == ("z",)
    path.write_text("offset: null")
    assert parse("--config", path) == Settings()


def test_the_command_line_takes_back_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("offset: 3\nclip: [0.2, 0.28]\n")
    assert parse("--config", path, "--offset", "none", "--clip") == Settings()


def test_a_second_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "run.yaml").write_text("rate: 3\n")
    path = tmp_path / "run.yaml"
    with pytest.raises(SystemExit):
        parse("--config", path, f"--config={path}")
    assert "one file is read" in capsys.readouterr().err


def test_mistakes_of_file_and_command_line_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("ratee: 3\nnames: [b]\n")
    with pytest.raises(SystemExit):
        parse("--config", path, "--fasst", "--rate", "x")
    first, second, third, _ = capsys.readouterr().err.splitlines()
    assert first.endswith(f"error: --config {path}: unknown flag --ratee=3; did you mean --rate?")
    assert second.strip() == "unknown flag --fasst; did you mean --fast?"
    assert third.strip() == "--rate: invalid float value: 'x'"


def test_what_is_written_is_what_was_read(tmp_path: Path) -> None:
    settings = Settings(2.5, -0.5, ("x", "y z"), (), False, local_rank=1)
    assert resolved_flags([settings]) == {"rate": 2.5, "offset": -0.5, "names": ["x", "y z"], "fast": False}
    path = write_config_file(tmp_path, [settings])
    assert parse("--config", path) == Settings(2.5, -0.5, ("x", "y z"), (), False)
    emptied = Settings(names=())  # not the default
    assert parse("--config", write_config_file(tmp_path, [emptied])) == emptied


def test_what_tells_runs_apart_is_what_is_not_default() -> None:
    assert telling_flags([Settings(rate=2.5, fast=False), Places(demos=("a", "b"), seed=7)]) == ["seed", "rate", "fast"]
    assert telling_flags([Settings(), Places()]) == ["seed"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("ratee: 3", "run.yaml: unknown flag --ratee=3; did you mean --rate?"),
        ("rate: fast", "run.yaml: --rate: invalid float value: 'fast'"),
        ("[1, 2]", "must hold lines"),
        ("a: [", "is not valid YAML"),
        ("rate: {x: 1}", "rate must be a value"),
        ("config: other.yaml", "names another file"),
        (None, "is missing"),
    ],
)
def test_mistakes_in_the_file(content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as stop:
        parse("--config", path)
    assert stop.value.code == 2 and words in capsys.readouterr().err


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

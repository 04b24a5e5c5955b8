"""`cli/new_env.py`: what it writes works as written, and its mistakes are told at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.check_env import build_parser as check_parser
from cli.check_env import main as check_env
from cli.collect_demos import build_parser as collect_parser
from cli.new_env import main
from cli.run_recipe import build_parser as recipe_parser
from rlvla.commands.custom_modules import parse_command_line
from tests.support.documentation import shell_commands

ROOT = Path(__file__).resolve().parents[2]
PARSERS = {"check_env": check_parser, "collect_demos": collect_parser, "run_recipe": recipe_parser}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_suites: None, capsys: pytest.CaptureFixture) -> Path:
    """The new environment, in the working directory; what the command has printed can be read."""
    monkeypatch.chdir(tmp_path)
    main(["my_robot"])
    return Path("my_robot")


def test_it_passes_its_own_tests(folder: Path, capsys: pytest.CaptureFixture) -> None:
    printed = capsys.readouterr().out
    assert sorted(os.listdir(folder)) == ["README.md", "my_robot_suite.py", "test_my_robot_suite.py"]
    assert "python -m pytest my_robot\n" in printed and "--custom_module my_robot/my_robot_suite.py\n" in printed
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 20 and "failed" not in done.stdout


def test_check_env_finds_nothing_wrong(folder: Path, capsys: pytest.CaptureFixture) -> None:
    check_env(["my_robot", "--custom_module", "my_robot/my_robot_suite.py", "--output", "seen.png"])
    printed = capsys.readouterr().out
    assert "reach: ok" in printed and "move the dot onto the ring" in printed
    assert Path("seen.png").is_file()


def test_the_commands_of_its_readme_are_right(folder: Path) -> None:
    tests, *commands = shell_commands((folder / "README.md").read_text())
    assert tests == ["python", "-m", "pytest", "my_robot"]
    names = [Path(words[1]).stem for words in commands]
    assert names == list(PARSERS)
    for name, words in zip(names, commands):
        flags = parse_command_line(PARSERS[name], words[2:])
        assert flags.task_suite_name in ("my_robot", ["my_robot"], ("my_robot",))


def test_it_keeps_the_style_of_the_house(folder: Path) -> None:
    rules = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(folder)]
    for words in (["check", "--ignore", "I001"], ["format", "--check"]):  # what is first-party depends on the folder
        done = subprocess.run([sys.executable, "-m", "ruff", *words, *rules], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_mistakes_are_told_at_once(folder: Path, capsys: pytest.CaptureFixture) -> None:
    for flags, words in (
        ([], ["give the new environment a name"]),
        (
            ["My-Robot", "--output", "my_robot"],
            ["--name My-Robot: write lower-case", "--output: my_robot has something in it"],
        ),
        (["class"], ["--name class: write lower-case"]),
        (["toy_reach"], ["--name toy_reach: a suite of this name ships with rlvla"]),
        (["my_robot"], ["--output: my_robot has something in it"]),
    ):
        with pytest.raises(SystemExit) as stop:
            main(flags)
        told = capsys.readouterr().err
        assert stop.value.code == 2 and told.count("\n  - ") == len(words)
        assert all(f"\n  - {text}" in told for text in words), told
    main(["my_robot", "--output", "elsewhere/with space"])
    assert "--custom_module 'elsewhere/with space/my_robot_suite.py'" in capsys.readouterr().out

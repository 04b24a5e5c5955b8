"""The list of commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.__main__ import main, purposes
from rlvla.utils.cli.programs import COMMANDS

ROOT = Path(__file__).resolve().parents[4]


def test_all_commands_are_listed_with_their_purpose(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    flat, at = " ".join(text.split()), 0
    files = {path.stem for path in ROOT.glob("cli/[a-z]*.py")}
    assert set(COMMANDS) == files == set(purposes(ROOT / "cli"))
    for name in purposes(ROOT / "cli"):
        first = (ROOT / "cli" / f"{name}.py").read_text(encoding="utf-8").partition("\n")[0].strip('"')
        assert f"python cli/{name}.py {first} " in f"{flat} "
        assert (at := flat.index(f"cli/{name}.py", at)) > 0, "in this order"


def test_commands_that_are_not_known_come_last(tmp_path: Path) -> None:
    for name in ("another", "eval_vla", "run_recipe", "__init__"):
        (tmp_path / f"{name}.py").write_text(f'"""What {name} does.\n\nAnd how.\n"""\n')
    assert purposes(tmp_path) == {name: f"What {name} does." for name in ("run_recipe", "eval_vla", "another")}


def test_version_and_mistakes(capsys: pytest.CaptureFixture) -> None:
    for words, status in ((["--version"], 0), (["train"], 2)):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == status
    out, err = capsys.readouterr()
    assert out.startswith("rlvla ") and "unrecognized arguments: train" in err


@pytest.mark.parametrize(
    ("words", "status", "part"),
    [
        ("eval-vla --pretrain nowhere", 2, "there is no folder nowhere"),
        ("eval_vla --version", 0, "rlvla "),
        ("help eval-vla", 0, "usage: eval_vla.py"),
        ("help all", 0, "python cli/run_recipe.py"),
        ("help", 0, "python cli/run_recipe.py"),
    ],
)
def test_a_command_is_run_or_explained(words: str, status: int, part: str) -> None:
    done = subprocess.run([sys.executable, "-m", "cli", *words.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status and part in done.stdout + done.stderr

"""Completion in a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlvla.utils.cli.flags import Parser

ROOT = Path(__file__).resolve().parents[4]


def test_a_shell_that_asks_is_answered_before_anything_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Parser] = []
    monkeypatch.setitem(sys.modules, "argcomplete", SimpleNamespace(autocomplete=asked.append))
    parser = Parser("x")
    parser.parse_args([])
    assert asked == []
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    parser.parse_args([])
    assert asked == [parser]


@pytest.mark.parametrize(
    ("line", "words"),
    [("--eps_cl", {"--eps_clip", "--eps_clip_low_high", "--eps_clip_dual"}), ("--kl_estimator k3", {"k3", "k3+"})],
)
def test_flags_and_choices_are_completed(line: str, words: set[str], tmp_path: Path) -> None:
    typed = f"train_ppo_vla.py {line}"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": typed, "COMP_POINT": str(len(typed)), "_ARGCOMPLETE_IFS": "\n"}
    answer = tmp_path / "answer"
    environment = os.environ | asked | {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, ROOT / "cli" / "train_ppo_vla.py"], env=environment, timeout=120)
    assert done.returncode == 0 and {word.strip() for word in answer.read_text().splitlines()} == words

"""Commands by the names under which they can be called here."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

import pytest

from rlvla.utils.cli.programs import as_installed, typed_command

TEXT = (
    "next: python cli/eval_vla.py --a 1\ndeepspeed -q --num_accelerators 2 cli/train_ppo_vla.py --b\nby cli/eval_vla.py"
)


def test_in_a_checkout_commands_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cli/train_ppo_vla.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert as_installed(TEXT) == TEXT
    assert typed_command(["cli/x.py", "--a"]) == ["python", "cli/x.py", "--a"]
    assert typed_command(["cli/x.py"], ranks=2) == ["deepspeed", "-q", "--num_accelerators", "2", "cli/x.py"]


@pytest.mark.parametrize("module", [False, True])
def test_installed_they_are_programs(module: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "/site-packages/rlvla/cli/train_ppo_vla.py" if module else "/venv/bin/rlvla-train-ppo-vla"
    monkeypatch.setattr(sys, "argv", [program, "--a"])
    spec = ModuleSpec("rlvla.cli.train_ppo_vla", None) if module else None
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert as_installed(TEXT).split("\n") == [
        "next: rlvla-eval-vla --a 1",
        "deepspeed -q --num_accelerators 2 --module rlvla.cli.train_ppo_vla --b",
        "by rlvla-eval-vla",
    ]
    assert typed_command(sys.argv) == ["rlvla-train-ppo-vla", "--a"]
    launched = ["deepspeed", "-q", "--num_accelerators", "2", "--module", "rlvla.cli.train_ppo_vla", "--a"]
    assert typed_command(sys.argv, ranks=2) == launched

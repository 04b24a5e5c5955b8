"""Commands by the names under which they can be called here."""

from __future__ import annotations

import shlex
import sys
from importlib.machinery import ModuleSpec

import pytest

from rlvla.utils.cli.programs import as_installed, resume_command, typed_command

TEXT = (
    "next: python cli/eval_vla.py --a 1\ndeepspeed -q --num_accelerators 2 cli/train_ppo_vla.py --b\nby cli/eval_vla.py"
)


def test_in_a_checkout_commands_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cli/train_ppo_vla.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert as_installed(TEXT) == TEXT
    assert typed_command(["cli/x.py", "--a"]) == ["python", "cli/x.py", "--a"]
    assert typed_command(["cli/x.py"], ranks=2) == ["deepspeed", "-q", "--num_accelerators", "2", "cli/x.py"]


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("--custom_module cli/my_rewards.py", None),
        ("--custom_module /home/me/cli/eval_vla.py", None),
        ("my-cli/eval_vla.py, ./cli/eval_vla.py, cli/eval_vla.pyc", None),
        ("(`python cli/eval_vla.py`)", "(`rlvla-eval-vla`)"),
        ("where deepspeed is missing: python cli/eval_vla.py", "where deepspeed is missing: rlvla-eval-vla"),
        ("deepspeed -q python cli/eval_vla.py", "deepspeed -q rlvla-eval-vla"),
        ("deepspeed is needed by cli/eval_vla.py", "deepspeed is needed by rlvla-eval-vla"),
        ("deepspeed --hostfile h -q cli/eval_vla.py", "deepspeed --hostfile h -q --module rlvla.cli.eval_vla"),
        ("deepspeed cli/eval_vla.py --a; cli/eval_vla.py", "deepspeed --module rlvla.cli.eval_vla --a; rlvla-eval-vla"),
    ],
)
def test_installed_only_the_commands_themselves_are_renamed(
    text: str, called: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/bin/rlvla-eval-vla"])
    assert as_installed(text) == (called or text)


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
    assert typed_command(["rlvla.cli.train_ppo_vla", "--a"]) == ["rlvla-train-ppo-vla", "--a"], "a module"
    assert typed_command(["rlvla.cli.train_ppo_vla", "--a"], ranks=2) == launched


@pytest.mark.parametrize("named", [["--load_checkpoint", "iteration_000010"], ["--load_checkpoint=iteration_000010"]])
def test_a_stopped_run_goes_on_from_its_newest_checkpoint(named: list[str]) -> None:
    command = resume_command(["cli/train.py", *named, "--seed", "3"])
    assert command == "python cli/train.py --load_checkpoint --seed 3"
    assert resume_command(["cli/train.py", "--load_checkpoint", "--seed", "3"]) == command


def test_an_evaluation_is_repeated_with_the_checkpoint_it_was_given() -> None:
    argv = ["cli/train.py", "--val_only", "--load_checkpoint", "iteration_000010"]
    assert resume_command(argv, trains=False) == shlex.join(["python", *argv])
    assert resume_command(argv[:2], trains=False) == "python cli/train.py --val_only", "it loaded no checkpoint"

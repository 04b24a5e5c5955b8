"""What a command imports before it knows that it will run: `--help` and a mistyped flag answer at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(path for path in ROOT.glob("cli/[a-z]*.py"))
HEAVY = {"torch", "transformers", "deepspeed", "peft", "robosuite", "mujoco", "tensorboard"}


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--mistyped", 2)])
def test_nothing_heavy_is_imported_before_the_flags_are_known(path: Path, flag: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", path, flag], capture_output=True, text=True, timeout=120)
    assert done.returncode == status
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "rlvla.utils.cli.flags" in imported
    assert not imported & HEAVY


def test_a_python_without_the_packages_is_told_where_they_are() -> None:
    """Python does not look into site-packages here."""
    command = [sys.executable, "-S", ROOT / "cli" / "check_env.py", "--help"]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "check_env.py: this Python lacks what rlvla needs" in done.stderr and ".venv/bin/activate" in done.stderr

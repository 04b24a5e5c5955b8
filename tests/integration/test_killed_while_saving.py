"""SIGKILL while checkpoints are written: a few times; `benchmarks/kill_while_saving.py` does it as often as wanted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_kill_leaves_the_newest_checkpoint_intact() -> None:
    command = [sys.executable, "benchmarks/kill_while_saving.py", "--kills", "10", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"10 kills, (\d+) of them while a checkpoint was being written.* 0 violations", done.stdout)
    assert found and int(found[1]) >= 3, done.stdout

"""The bookkeeping of the quickstart: stages run once, their seconds are counted whole."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "scripts" / "quickstart.sh"


def run_stages(folder: Path, body: str) -> subprocess.CompletedProcess:
    """The script's own `stage` with other stages."""
    text = SCRIPT.read_text()
    helpers = text[text.index("running=") : text.index("demos() {")]
    assert "stage() {" in helpers
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail\nOUT={folder}\n{helpers}\n{body}"], capture_output=True, text=True
    )


def noted(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "seconds.txt").read_text().splitlines()]


def test_an_interrupted_stage_runs_again_and_both_attempts_are_counted(tmp_path: Path) -> None:
    assert run_stages(tmp_path, "stage demos true; stage sft kill -INT $$").returncode != 0
    failed = run_stages(tmp_path, "stage demos true; stage sft false")
    assert failed.returncode == 1
    assert failed.stderr == "== sft: not finished; the same command continues\n"
    last = run_stages(tmp_path, "stage demos true; stage sft sleep .3; stage sft false")
    assert last.returncode == 0, last.stderr
    assert noted(tmp_path) == ["demos", "sft/interrupted", "sft/interrupted", "sft"]
    assert last.stdout.count("done before") == 2
    assert re.search(r"^sft 0\.[3-9]$", (tmp_path / "seconds.txt").read_text(), re.M)

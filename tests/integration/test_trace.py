"""The pages about the files of an iteration agree with a recorded one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# They draw the learning curve, at most once in some seconds: in the recorded iteration only on a slow machine.
TIMED = {"rlvla/evaluation/pages.py", "rlvla/evaluation/statistics.py"}
FILE = re.compile(r"`(rlvla/[\w/]+\.py)`")


def recorded_on_the_page() -> dict[str, set[str]]:
    """Name of a trace -> the files that docs/trace.md lists."""
    page = (ROOT / "docs" / "trace.md").read_text(encoding="utf-8")
    traces = re.findall(r"<!-- trace (\w+) -->(.*?)<!-- end -->", page, re.DOTALL)
    return {name: set(FILE.findall(table)) for name, table in traces}


def test_the_reading_order_of_an_iteration_names_files_that_run() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    section = page.partition("## One PPO iteration, file by file")[2].partition("All files that run")[0]
    listed = [match[1] for match in re.finditer(r"^\| \w* ?\| `(rlvla/[\w/]+\.py)` \|", section, re.MULTILINE)]
    assert len(listed) >= 18 and set(listed) <= recorded_on_the_page()["ppo"]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_page_lists_the_files_of_a_recorded_iteration(tmp_path: Path) -> None:
    page = tmp_path / "trace.md"
    page.write_text("\n".join(f"<!-- trace {name} -->\n\n<!-- end -->" for name in ("ppo", "sac", "evaluation")))
    command = [sys.executable, "benchmarks/trace_iteration.py", "--write", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = recorded_on_the_page()
    traces = re.findall(r"<!-- trace (\w+) -->(.*?)<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)
    for name, table in traces:
        assert set(FILE.findall(table)) - TIMED == expected[name] - TIMED, (
            f"write {name} anew: {' '.join(command[1:3])} docs/trace.md"
        )
    assert len(traces) == 3

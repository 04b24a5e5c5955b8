"""`benchmarks/gpu.py --rehearse`: parts on a CPU with tiny policies, each in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("device", "openvla", "smolvla_expert", "attention")


def measure(output: Path, *flags: str) -> subprocess.CompletedProcess:
    words = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--output", str(output), *flags]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_parts_are_rehearsed_once(tmp_path: Path) -> None:
    done = measure(tmp_path, "--rehearse", "--parts", *PARTS)
    assert done.returncode == 0, done.stdout
    results = {part: json.loads((tmp_path / f"{part}.json").read_text())["figures"] for part in PARTS}
    for policy in ("openvla", "smolvla_expert"):
        figures = results[policy]
        assert all(row["per_s"] > 0 for phase in ("acting", "scoring", "update") for row in figures[phase])
        assert figures["agreement"]["ratio_scored_at_1"]["max"] < 1e-3
        assert figures["update_profile"] and figures["offload_during_rollout"]
    rates = json.loads((tmp_path / "rates.json").read_text())["policies"]
    assert [entry["family"] for entry in rates] == ["openvla", "smolvla"]
    (tmp_path / "attention.json").unlink()
    again = measure(tmp_path, "--rehearse", "--parts", *PARTS)
    assert again.returncode == 0 and again.stdout.splitlines()[0].startswith("attention: done"), "no other runs again"
    page = measure(tmp_path, "--table").stdout
    assert "| SmolVLA, expert |" in page and "Not yet measured: `openvla_two_images`" in page


@pytest.mark.slow
def test_offloading_and_asynchronous_rollouts_are_rehearsed(tmp_path: Path) -> None:
    parts = ("pi0_offloaded", "async_rollout")
    done = measure(tmp_path, "--rehearse", "--parts", *parts)
    assert done.returncode == 0, done.stdout
    offloaded, rollouts = (json.loads((tmp_path / f"{part}.json").read_text())["figures"] for part in parts)
    assert offloaded["update"][0]["per_s"] > 0 and "offload_during_rollout" not in offloaded
    assert {title.partition(",")[0] for title in rollouts} == {"synchronous", "--max_staleness 1"}
    assert all(seconds["iteration"] > 0 for seconds in rollouts.values())
    assert "| --max_staleness 1, 0.001 s |" in measure(tmp_path, "--table").stdout


def test_no_part_starts_that_would_not_end_in_time(tmp_path: Path) -> None:
    done = measure(tmp_path, "--rehearse", "--parts", "openvla", "--minutes", "0.01")
    assert done.returncode == 1 and "openvla: not started" in done.stdout
    assert not (tmp_path / "openvla.json").exists()


@pytest.mark.skipif(
    subprocess.run(["nvidia-smi"], capture_output=True, shell=True).returncode == 0, reason="there is a GPU"
)
def test_without_a_gpu_the_command_says_what_to_do(tmp_path: Path) -> None:
    done = measure(tmp_path, "--parts", "device")
    assert done.returncode == 2 and "--rehearse runs on the CPU" in done.stderr

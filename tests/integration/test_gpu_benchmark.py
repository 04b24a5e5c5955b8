"""`benchmarks/gpu.py --rehearse`: parts on a CPU with tiny policies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

REHEARSED = ("device", "openvla", "smolvla_expert")


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *flags: str) -> None:
    """The command, in this process."""
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", "--output", str(output), *flags])
    gpu.main()


@pytest.mark.nightly
def test_parts_are_rehearsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in REHEARSED:
        gpu.run_part(part, tmp_path, rehearse=True)
    results = {part: json.loads((tmp_path / f"{part}.json").read_text())["figures"] for part in REHEARSED}
    for policy in ("openvla", "smolvla_expert"):
        figures = results[policy]
        assert all(row["per_s"] > 0 for phase in ("acting", "scoring", "update") for row in figures[phase])
        assert figures["agreement"]["ratio_scored_at_1"]["max"] < 1e-3
        assert figures["update_profile"] and figures["offload_during_rollout"]
    run(monkeypatch, tmp_path, "--rehearse", "--parts", *REHEARSED, "attention")
    assert capsys.readouterr().out.startswith("attention: done"), "no other runs again"
    assert json.loads((tmp_path / "attention.json").read_text())["figures"]["math"] > 0
    rates = json.loads((tmp_path / "rates.json").read_text())["policies"]
    assert [entry["family"] for entry in rates] == ["openvla", "smolvla"]
    run(monkeypatch, tmp_path, "--table")
    page = capsys.readouterr().out
    assert "| SmolVLA, expert |" in page and "Not yet measured: `openvla_two_images`" in page


@pytest.mark.nightly
def test_offloading_and_asynchronous_rollouts_are_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ("pi0_offloaded", "async_rollout")
    for part in parts:
        gpu.run_part(part, tmp_path, rehearse=True)
    offloaded, rollouts = (json.loads((tmp_path / f"{part}.json").read_text())["figures"] for part in parts)
    assert offloaded["update"][0]["per_s"] > 0 and "offload_during_rollout" not in offloaded
    assert {title.partition(",")[0] for title in rollouts} == {"synchronous", "--max_staleness 1"}
    assert all(seconds["iteration"] > 0 for seconds in rollouts.values())
    capsys.readouterr()
    run(monkeypatch, tmp_path, "--table")
    assert "| --max_staleness 1, 0.001 s |" in capsys.readouterr().out


def test_no_part_starts_that_would_not_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, "--rehearse", "--parts", "openvla", "--minutes", "0.01")
    assert ended.value.code == 1 and "openvla: not started" in capsys.readouterr().out
    assert not (tmp_path / "openvla.json").exists()


@pytest.mark.skipif(
    subprocess.run(["nvidia-smi"], capture_output=True, shell=True).returncode == 0, reason="there is a GPU"
)
def test_without_a_gpu_the_command_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, "--parts", "device")
    assert ended.value.code == 2 and "--rehearse runs on the CPU" in capsys.readouterr().err

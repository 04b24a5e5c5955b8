"""Phases of an iteration, and traces of chosen iterations."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from cli.train_ppo_vla import main as train
from rlvla.trainer.measurements import Stopwatch
from rlvla.utils.files import read_metrics

FLAGS = [
    *("--num_episodes", "8", "--rollout_batch_size", "4", "--train_batch_size", "4", "--num_envs", "1"),
    *("--eval_episodes", "2", "--no-val_before_train", "--max_steps", "8", "--no-use_tensorboard"),
]


def test_phases_add_up_and_may_be_missing() -> None:
    watch = Stopwatch("update")
    for _ in range(2):
        with watch.phase("play"):
            time.sleep(0.02)
    assert watch.seconds["update"] == 0.0 and 0.04 <= watch.seconds["play"] <= watch.elapsed


def test_a_chosen_iteration_leaves_a_trace(policy_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    folder = tmp_path / "run"
    train(["--pretrain", str(policy_folder), "--save_path", str(folder), *FLAGS, "--profile_steps", "2"])
    (path,) = (folder / "profile").iterdir()
    assert path.name == "iteration_000002_rank0.json.gz"
    printed = "".join(capfd.readouterr())
    assert f"trace in {path}; open it at https://ui.perfetto.dev" in printed
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ranges = {e["name"]: e for e in events if e.get("cat") == "user_annotation"}
    assert {"rollout", "make_experience", "update"} <= set(ranges)
    backward = [e["ts"] for e in events if e["name"].startswith("autograd::engine::evaluate_function")]
    update = ranges["update"]
    assert backward and all(update["ts"] <= at <= update["ts"] + update["dur"] for at in backward)
    ends = [ranges[name]["ts"] + ranges[name]["dur"] for name in ("rollout", "make_experience")]
    assert ends[0] <= ranges["make_experience"]["ts"] and ends[1] <= update["ts"], "in the order of an iteration"
    for record in [r for r in read_metrics(folder) if "timing_s/update" in r]:
        assert {"perf/update_tokens_per_s", "perf/rollout_decisions_per_s", "perf/max_rss_gb"} <= set(record)
        rows = record["perf/update_decisions_per_s"] * record["timing_s/update"]
        assert rows == pytest.approx(record["perf/rollout_decisions_per_s"] * record["timing_s/rollout"])

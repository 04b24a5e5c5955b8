"""PPO learns toy_reach, and to read, with one seed, through the script a newcomer runs.

`benchmarks/learning.py` has more of both.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cli.eval_vla import main as evaluate

ROOT = Path(__file__).resolve().parents[2]
SEED = 0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_reaches_90_percent_on_held_out_states(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "SEED": str(SEED)}
    environment |= {"RANKS": "1", "NUM_DEMOS": "300"}  # and fewer episodes than the recipe: half the time
    script = ROOT / "examples" / "scripts" / "toy_reach.sh"
    done = subprocess.run(
        ["bash", str(script), "--num_episodes", "1280", "--deterministic_rollout"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    evaluations = json.loads((tmp_path / "ppo" / "evaluations.json").read_text())
    start, end = evaluations[0], evaluations[-1]
    assert start["protocol"] == end["protocol"] == "heldout"
    assert start["success_at_end"]["n"] == end["success_at_end"]["n"] == 200
    assert 0.2 <= start["success_at_end"]["rate"] <= 0.6, "the supervised start is not the one this test is about"
    assert end["success_at_end"]["rate"] >= 0.9, done.stdout[-3000:]
    told = ["--instructions", "own", "shuffled", "--eval_episodes", "60", "--output", str(tmp_path / "told.json")]
    evaluate(["--pretrain", str(tmp_path / "ppo"), *told])
    own, shuffled = json.loads((tmp_path / "told.json").read_text())["suites"].values()
    assert own["results"][0]["success_at_end"]["rate"] >= 0.9
    rate = shuffled["results"][0]["success_at_end"]["rate"]
    assert rate <= 1 / 3, "without the instruction one disc in three is the right one"

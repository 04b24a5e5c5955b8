"""`recipes/libero.yaml` on one task, with one seed: PPO improves a start from three demonstrations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.run_recipe import main as run_recipe
from tests.support.libero_requirements import require_libero

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]


def test_ppo_improves_one_task(tmp_path: Path) -> None:
    require_libero()
    settings = [
        "demos.task_ids=[2]",
        "demos.num_demos=3",
        "sft.max_steps=150",
        "rl.num_episodes=768",
        "rl.eval_episodes=10",
        "rl.task_sampling=null",
    ]
    settings += [f"{stage}.num_videos=0" for stage in ("eval_sft", "eval_rl")]
    run_recipe([str(ROOT / "recipes/libero.yaml"), "--output", str(tmp_path / "run"), "--set", *settings])
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["sft"]["n"] == report["rl"]["n"] == 10
    assert report["difference"]["gained"] > report["difference"]["lost"]

"""The VLM reward under the deepspeed launcher: both ranks ask, and the log counts for both."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlvla.utils.logging import read_metrics
from tests.rewards.judge_server import completion, judge_server
from tests.trainer.test_launcher import PPO_FLAGS, PPO_SCRIPT, launch

pytestmark = pytest.mark.slow
pytest.importorskip("openai", reason="the extra vlm is not installed")


def test_both_ranks_ask(policy_folder: Path, tmp_path: Path) -> None:
    with judge_server() as server:
        server.answer = lambda request: (200, completion('{"action_score": 0.5, "progress": 0.5}'))
        words = ["--pretrain", policy_folder, "--save_path", tmp_path / "run", *PPO_FLAGS, "--vlm_cache_size", "0"]
        words += ["--reward", "success:1", "vlm:0.3", "--vlm_url", f"{server.url}/v1", "--vlm_model", "judge"]
        launch(PPO_SCRIPT, *words)
    logged = [line for line in read_metrics(tmp_path / "run") if "reward/vlm_requests" in line]
    assert len(logged) == 2 and sum(line["reward/vlm_requests"] for line in logged) == len(server.requests) >= 2 * 16
    assert not any(line["reward/vlm_failures"] for line in logged)

"""The VLM reward on two ranks: both ask, the log counts for both, and both give up together."""

from __future__ import annotations

import os
import subprocess
from itertools import count
from pathlib import Path

import pytest

from cli.train_ppo_vla import main as ppo
from rlvla.utils.files import read_metrics
from tests.support.judge_server import completion, judge_server, of_start_check
from tests.support.launching import PPO_FLAGS, PPO_SCRIPT, launch_command
from tests.support.two_ranks import run

pytestmark = pytest.mark.slow
pytest.importorskip("pydantic", reason="the extra vlm is not installed")


def flags(policy: Path, folder: Path, url: str) -> list[str]:
    words = [
        "--pretrain",
        str(policy),
        "--save_path",
        str(folder),
        *PPO_FLAGS,
        "--vlm_cache_size",
        "0",
        "--vlm_retries",
        "0",
        "--vlm_timeout",
        "120",
    ]
    return [*words, "--reward", "success:1", "vlm:0.3", "--vlm_url", f"{url}/v1", "--vlm_model", "judge"]


def train_on_a_rank(rank: int, words: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    ppo(words)


def test_both_ranks_ask(policy_folder: Path, tmp_path: Path) -> None:
    with judge_server() as server:
        server.answer = lambda request: (200, completion('{"action_score": 0.5, "progress": 0.5}'))
        run(train_on_a_rank, flags(policy_folder, tmp_path / "run", server.url))
    asked = [request for request in server.requests if not of_start_check(request)]
    logged = [line for line in read_metrics(tmp_path / "run") if "reward/vlm_requests" in line]
    assert len(logged) == 2 and sum(line["reward/vlm_requests"] for line in logged) == len(asked) >= 2 * 16
    assert not any(line["reward/vlm_failures"] for line in logged)


@pytest.mark.nightly
def test_both_ranks_stop_when_too_many_answers_of_both_together_are_bad(policy_folder: Path, tmp_path: Path) -> None:
    """Whichever rank got them: one that went on alone would wait for the other for ever."""
    with judge_server() as server:
        numbers = count()

        def answer(request: dict) -> tuple[int, object]:
            good = of_start_check(request) or next(numbers) >= 16
            return 200, completion('{"action_score": 0.5, "progress": 0.5}' if good else "it went well")

        server.answer = answer
        command = launch_command(PPO_SCRIPT, *flags(policy_folder, tmp_path / "run", server.url))
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "the run was ended: 16 of 16 requests" in done.stderr and "--vlm_max_failures 0.2 allows" in done.stderr
    assert "the last failing request to" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "policy").exists()

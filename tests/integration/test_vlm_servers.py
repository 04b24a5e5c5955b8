"""The VLM reward against real OpenAI-compatible servers, on tiny models with random weights."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from transformers.utils.import_utils import is_serve_available

from rlvla.rewards import RewardConfig
from rlvla.rewards.vlm.client import FailedAnswer, VLMClient
from rlvla.rewards.vlm.questions import question_names
from rlvla.rewards.vlm.scorers import Score, Scorer
from rlvla.rewards.vlm.server_check import server_problem
from rlvla.utils.errors import Problem
from tests.support.autoregressive import needs_vllm

ROOT = Path(__file__).parents[2]
pytest.importorskip("pydantic", reason="the extra vlm is not installed")
IMAGE = np.random.default_rng(0).integers(0, 255, (28, 28, 3)).astype(np.uint8)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def served(
    command: list[str], port: int, seconds: float, log: Path, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """A server process that answers on /health, with environment variables of its own; its base URL."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **settings}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        deadline = time.monotonic() + seconds
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, model: str, scorer: str, vlm_max_tokens: int = 32) -> tuple[Score | FailedAnswer, dict[str, float]]:
    config = RewardConfig(vlm_url=url, vlm_model=model, vlm_timeout=120.0, vlm_retries=0, vlm_max_tokens=vlm_max_tokens)
    client, asked = VLMClient(config), Scorer(scorer)
    answer = client.ask(asked, asked.prompt("lift the cube"), [IMAGE] * (asked.frames or 3)).result(200)
    metrics = client.take_metrics()
    client.close()
    return answer, metrics


def problem_of(url: str, model: str, scorer: str = "progress", **options: int) -> Problem | None:
    config = RewardConfig(vlm_url=url, vlm_model=model, vlm_timeout=120.0, vlm_scorer=scorer, **options)
    return server_problem(config, Scorer(scorer))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(
    not is_serve_available(), reason="transformers serve needs pip install transformers[serving] (fastapi, ...)"
)
def test_transformers_serve(tmp_path: Path) -> None:
    """It ignores schemas, and a model with random weights babbles: the answer is read, and refused for what it is."""
    from tests.support.tiny_llava import build_tiny_llava

    folder, port = str(build_tiny_llava(tmp_path / "llava")), free_port()
    serve = Path(sys.executable).with_name("transformers")
    command = [str(serve), "serve", folder, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with served(command, port, 300, tmp_path / "log.txt") as url:
        babble = problem_of(url, folder, vlm_max_tokens=32)
        assert babble is not None and babble.flag in ("vlm_model", "vlm_max_tokens"), babble
        assert problem_of(url, str(tmp_path / "nobody")) is not None
        wrong = problem_of(url.removesuffix("/v1") + "/v2", folder)
        assert wrong is not None and wrong.flag == "vlm_url" and "ends in /v1" in wrong
        for scorer in ("progress", "pairwise"):
            answer, metrics = ask(url, folder, scorer)
            assert isinstance(answer, FailedAnswer) and answer.kind in ("AnswerError", "AnswerCutOff"), answer
            assert metrics["completion_tokens"] == 32 and metrics["prompt_tokens"] > 20
        answer, _ = ask(url, folder, "logprob")
        assert isinstance(answer, FailedAnswer) and "no log-probs" in answer.message


@pytest.mark.slow
@needs_vllm
def test_vllm(tmp_path: Path) -> None:
    """It honours schemas, so that even a model with random weights gives a valid answer to each question."""
    from tests.support.tiny_qwen_vl import build_tiny_qwen_vl

    folder, port = str(build_tiny_qwen_vl(tmp_path / "qwen")), free_port()
    command = ["bash", str(ROOT / "examples/scripts/serve_vlm_vllm.sh")]
    settings = {"MODEL": folder, "PORT": str(port), "MAX_MODEL_LEN": "2048"}
    with served(command, port, 600, tmp_path / "log.txt", settings) as url:
        for scorer in question_names():
            answer, metrics = ask(url, folder, scorer, vlm_max_tokens=64)
            assert isinstance(answer, Score), f"{scorer}: {answer}"
            assert 0 < metrics["completion_tokens"] < 64
            assert problem_of(url, folder, scorer) is None
        unknown = problem_of(url, "nobody")
        assert unknown is not None and f"does not know it; it has {folder}" in unknown

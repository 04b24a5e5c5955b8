"""What a server is asked before training: each way in which it cannot judge is one clear error."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import train_ppo_vla
from rlvla.rewards import RewardConfig, RewardPlan
from rlvla.utils.errors import ConfigError
from tests.support.judge_server import JudgeServer, completion, judge_server, models

pytest.importorskip("openai", reason="the extra vlm is not installed")


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as running:
        yield running


def problems(url: str, model: str = "judge", **options: Any) -> list[str]:
    config = RewardConfig(reward=("vlm",), vlm_url=url, vlm_model=model, **{"vlm_timeout": 120.0, **options})
    try:
        RewardPlan.from_config(config).close()
    except ConfigError as error:
        return error.problems
    return []


def test_a_model_that_is_listed_costs_no_tokens(server: JudgeServer) -> None:
    assert problems(f"{server.url}/v1") == []
    assert server.paths == ["/v1/models"] and server.requests == []


@pytest.mark.parametrize("listing", [(404, {"error": "no such path"}), (200, models("other")), (200, b"<html>")])
def test_otherwise_one_token_decides(server: JudgeServer, listing: tuple[int, Any]) -> None:
    server.list_models = lambda: listing
    server.answer = lambda request: (200, completion("Hi"))
    assert problems(f"{server.url}/v1") == []
    (request,) = server.requests
    assert request["model"] == "judge" and request["max_tokens"] == 1


NOT_FOUND = (404, {"error": {"message": "the model `judge` does not exist"}})


@pytest.mark.parametrize(
    ("listing", "answer", "words"),
    [
        ((404, b"Not Found"), (404, b"Not Found"), ["lists no models", "HTTP 404", "usually ends in /v1"]),
        ((401, {"error": "no key"}), None, ["refuses access (HTTP 401", "OPENAI_API_KEY"]),
        ((403, {"error": "not you"}), None, ["refuses access (HTTP 403", "OPENAI_API_KEY"]),
        ((404, {}), (401, {"error": "no key"}), ["refuses access (HTTP 401", "OPENAI_API_KEY"]),
        ((200, models("a", "b")), NOT_FOUND, ["--vlm_model judge: the server", "does not know it; it has a, b"]),
        ((200, models(*"abcdefg")), NOT_FOUND, ["it has a, b, c, d, e, ..."]),
        ((200, models("a")), (500, {"error": "out of memory"}), ["HTTP 500", "out of memory"]),
        ((200, models("a")), (200, b"<html>"), ["is no OpenAI-compatible server"]),
        ((200, models("a")), (200, {"hello": 1}), ["is no OpenAI-compatible server", "no chat completion"]),
        ((200, models("a")), (200, None), ["does not answer", "start the server first"]),
    ],
)
def test_a_server_that_cannot_judge(
    server: JudgeServer, listing: tuple[int, Any], answer: tuple[int, Any] | None, words: list[str]
) -> None:
    server.list_models = lambda: listing
    server.answer = lambda request: answer or pytest.fail("it need not be asked")
    found = problems(f"{server.url}/v1")
    assert len(found) == 1 and all(word in found[0] for word in [server.url, *words]), found
    assert "\n" not in found[0]


def test_a_port_that_accepts_and_stays_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        (problem,) = problems(url, vlm_timeout=0.3)
    assert "did not answer within --vlm_timeout 0.3 seconds" in problem


def test_training_refuses_before_it_starts(
    server: JudgeServer, policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Beside the other mistakes of the command line; no run folder appears."""
    server.answer = lambda request: NOT_FOUND
    words = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "ppo"), "--reward", "success", "vlm:0.3"]
    words += ["--vlm_url", f"{server.url}/v1", "--vlm_model", "nobody", "--gamma_shaping", "0.5"]
    with pytest.raises(SystemExit) as stop:
        train_ppo_vla.main(words)
    err = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and not (tmp_path / "ppo").exists()
    assert "--vlm_model nobody: the server" in err and "it has judge, m" in err and "--gamma_shaping 0.5 must" in err

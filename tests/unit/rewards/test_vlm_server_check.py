"""What a server is asked before training: each way in which it cannot judge is one clear error."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import train_ppo_vla
from rlvla.rewards import RewardConfig, RewardPlan
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.http import client as http_client
from tests.support.judge_server import JudgeServer, completion, judge_server, models

pytest.importorskip("pydantic", reason="the extra vlm is not installed")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)
    with judge_server() as running:
        yield running


def problems(url: str, model: str = "judge", **options: Any) -> list[Problem]:
    config = RewardConfig(reward=("vlm",), vlm_url=url, vlm_model=model, **{"vlm_timeout": 120.0, **options})
    try:
        RewardPlan.from_config(config).close()
    except ConfigError as error:
        return error.problems
    return []


GOOD = {
    "progress": '{"action_score": 0.5, "progress": 0.5}',
    "grasp": '{"grasp": 0.5}',
    "pairwise": '{"closer": 1}',
    "episode": '<think>{hm}</think> It is {"score": 4}',
}


def parts(request: dict, kind: str) -> list[dict]:
    content = request["messages"][0]["content"]
    return [] if isinstance(content, str) else [part for part in content if part["type"] == kind]


@pytest.mark.parametrize("scorer", GOOD)
def test_it_is_asked_what_training_will_ask(server: JudgeServer, scorer: str) -> None:
    server.answer = lambda request: (200, completion(GOOD[scorer]))
    assert problems(f"{server.url}/v1", vlm_scorer=scorer) == []
    (request,) = server.requests
    assert len(parts(request, "image_url")) == {"pairwise": 2, "episode": 6}.get(scorer, 1)
    assert request["model"] == "judge" and request["response_format"]["type"] == "json_schema"


def test_log_probs_are_asked_for(server: JudgeServer) -> None:
    first = {"token": "True", "logprob": -0.1, "top_logprobs": [{"token": "True", "logprob": -0.1}]}
    server.answer = lambda request: (200, completion("True", logprobs={"content": [first]}))
    assert problems(f"{server.url}/v1", vlm_scorer="logprob") == []
    assert server.requests[0]["logprobs"] and len(server.requests) == 1
    server.answer = lambda request: (200, completion("True"))
    (problem,) = problems(f"{server.url}/v1", vlm_scorer="logprob")
    assert (problem.flag, problem.reason) == ("vlm_scorer", "unavailable")


@pytest.mark.parametrize("status", [400, 422, 500])
@pytest.mark.parametrize(
    ("refuses", "scorer", "flag"),
    [
        (lambda request: parts(request, "image_url"), "progress", "vlm_model"),
        (lambda request: len(parts(request, "image_url")) > 1, "pairwise", "vlm_model"),
        (lambda request: "response_format" in request, "progress", "vlm_structured_output"),
        (lambda request: "logprobs" in request, "logprob", "vlm_scorer"),
    ],
)
def test_what_the_server_cannot_do_is_named(
    server: JudgeServer, refuses: Callable[[dict], Any], scorer: str, flag: str, status: int
) -> None:
    server.answer = lambda request: (status, {"error": "no"}) if refuses(request) else (200, completion("hello"))
    (problem,) = problems(f"{server.url}/v1", vlm_scorer=scorer)
    assert (problem.flag, problem.reason) == (flag, "unavailable")


@pytest.mark.parametrize(
    ("answer", "flag"),
    [
        (completion("I would say half of it"), "vlm_model"),
        (completion('{"progress": "0.5", "action_score": true}'), "vlm_model"),
        (completion('{"progress": 0.5, "acti', finish_reason="length"), "vlm_max_tokens"),
        (completion("<think>It is hard {to} say", finish_reason="length"), "vlm_max_tokens"),
    ],
)
def test_an_answer_of_no_use(server: JudgeServer, answer: dict, flag: str) -> None:
    server.answer = lambda request: (200, answer)
    (problem,) = problems(f"{server.url}/v1")
    assert (problem.flag, problem.reason) == (flag, "unavailable") and "\n" not in problem.text


def test_a_redirect_to_another_host(server: JudgeServer) -> None:
    server.list_models = lambda: (307, b"", {"Location": "http://127.0.0.2/v1/models"})
    (problem,) = problems(f"{server.url}/v1")
    assert problem.flag == "vlm_url" and "127.0.0.2" in problem


def test_a_key_with_a_line_break(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    (problem,) = problems(f"{server.url}/v1")
    assert "OPENAI_API_KEY" in problem and "secret" not in problem and server.paths == []


@pytest.mark.parametrize(
    "url", ["http://a b/v1", "http://[::1", "http://h:99999/v1", "ftp://h", "http://me:pw@h/v1", "//"]
)
def test_what_is_no_url(url: str) -> None:
    (problem,) = problems(url)
    assert (problem.flag, problem.reason) == ("vlm_url", "out_of_range")


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
        ((200, models("a")), (200, b"<html>"), ["is not an OpenAI-compatible server"]),
        ((200, models("a")), (200, {"hello": 1}), ["is not an OpenAI-compatible server", "not a chat completion"]),
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

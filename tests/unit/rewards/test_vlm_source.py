"""The VLM reward against a server that answers, and against one that misbehaves in every way."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from rlvla.rewards import EpisodeStart, RewardConfig, RewardPlan
from rlvla.rewards.vlm.client import FailedAnswer, VLMClient
from rlvla.rewards.vlm.scorers import AnswerError, Completion, Score, Scorer, read_completion
from rlvla.rewards.vlm.server import VLMFailuresError
from rlvla.utils.errors import ConfigError
from rlvla.utils.http import client as http_client
from tests.support.judge_server import JudgeServer, completion, judge_server
from tests.support.reward_cases import make_chunk, make_observation, make_task, play

pytest.importorskip("pydantic", reason="the extra vlm is not installed")
TASK = make_task()


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as running:
        yield running


def make_plan(server: JudgeServer, **options: Any) -> RewardPlan:
    """A plan without the check of the server, which has tests of its own."""
    fast = {"vlm_timeout": 120.0, "vlm_retries": 0}
    config = RewardConfig(reward=("vlm:1.0",), vlm_url=f"{server.url}/v1", vlm_model="judge", **{**fast, **options})
    with mock.patch("rlvla.rewards.vlm.server.server_problem", return_value=None):
        return RewardPlan.from_config(config)


def brightness(request: dict) -> float:
    """The value that `make_observation` painted into the last image of a request, as progress."""
    import base64
    import io

    from PIL import Image

    url = request["messages"][0]["content"][-1]["image_url"]["url"]
    image = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))
    return image.getpixel((0, 0))[0] / 100


def chunks(*values: int, steps: int = 5, terminated: bool = False) -> list:
    return [
        make_chunk([set()] * steps, terminated=terminated and i == len(values) - 1, value=value)
        for i, value in enumerate(values)
    ]


def test_an_episode_from_frames_to_rewards(server: JudgeServer) -> None:
    server.answer = lambda r: (200, completion(json.dumps({"action_score": 0.5, "progress": brightness(r)})))
    plan = make_plan(server)
    sample, _ = play(plan, TASK, chunks(25, 50, 50))
    expected = [[0.08] * 5, [0.08] * 5, [0.0] * 5]
    assert sample.rewards.numpy() == pytest.approx(np.array(expected)), "raw .2 over 5 steps, scaled by 2"
    assert sample.reward_info == {"vlm_progress": 0.5, "vlm_failed": 0}
    metrics = plan.metrics()
    assert metrics["reward/vlm_requests"] == 3 and metrics["reward/vlm_cache_hits"] == 1, "the still frame is known"
    assert metrics["reward/vlm_prompt_tokens"] == 30 and metrics["reward/vlm_completion_tokens"] == 9
    assert metrics["reward/vlm_seconds"] > 0 and plan.metrics()["reward/vlm_requests"] == 0
    content = server.requests[0]["messages"][0]["content"]
    assert "do it" in content[0]["text"] and "{" not in content[0]["text"].split("JSON only:")[0]
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert set(schema["required"]) == {"action_score", "progress"}
    plan.close()


def test_the_judge_sees_scenes_upright(server: JudgeServer) -> None:
    server.answer = lambda r: (200, completion(json.dumps({"action_score": 0, "progress": brightness(r)})))
    chunk = make_chunk([set()] * 5, value=10)
    chunk.observation.images[:, -1] = 90  # the first row of the picture, where rows come from below
    for below, progress in ((False, 0.1), (True, 0.9)):
        plan = make_plan(server)
        sample, _ = play(plan, replace(TASK, images_flipped_vertically=below), [chunk])
        assert sample.reward_info["vlm_progress"] == progress
        plan.close()


def test_frames_are_judged_at_decisions_far_enough_apart(server: JudgeServer) -> None:
    server.answer = lambda r: (200, completion(json.dumps({"action_score": 0, "progress": brightness(r)})))
    plan = make_plan(server, vlm_eval_frequency=5, vlm_cache_size=0)
    sample, _ = play(plan, TASK, chunks(10, 20, 30, 40, steps=3, terminated=True))
    assert len(server.requests) == 3, "after reset, 6 and 12 steps"
    assert sample.rewards.numpy() == pytest.approx(np.full((4, 3), 2 * 0.8 * 0.2 / 6))
    short, _ = play(plan, TASK, chunks(10, 20, 30, steps=3, terminated=True))
    rates = [0.2 / 6] * 6 + [0.1 / 3] * 3
    assert short.rewards.flatten().numpy() == pytest.approx(1.6 * np.array(rates)), "the last window by its real length"
    plan.close()


def test_the_last_window_of_an_episode_that_a_source_ended(server: JudgeServer) -> None:
    """Dynamic truncation or a reject come without a word of the environment: the frame is judged all the same."""
    server.answer = lambda r: (200, completion(json.dumps({"action_score": 0, "progress": brightness(r)})))
    plan = make_plan(server, vlm_eval_frequency=5)
    sample, _ = play(plan, TASK, chunks(10, 20, 30, steps=3))
    rates = [0.2 / 6] * 6 + [0.1 / 3] * 3
    assert sample.rewards.flatten().numpy() == pytest.approx(1.6 * np.array(rates))
    assert sample.reward_info["vlm_progress"] == 0.3
    plan.close()


def test_nearly_there_is_not_worth_more_than_success(server: JudgeServer) -> None:
    """A potential that stayed where a truncated episode came to would be paid on top, where nothing follows it."""
    server.answer = lambda r: (200, completion(json.dumps({"action_score": 0, "progress": brightness(r)})))
    plan = make_plan(server, vlm_progress_term="potential")
    plan.sources["vlm"].gamma = 1.0
    scores = {}
    for bootstraps in (True, False):
        plan.sources["vlm"].bootstraps = bootstraps
        for ended in ("terminated", "truncated"):
            last = make_chunk([set()] * 5, value=90, **{ended: True})
            scores[ended, bootstraps] = play(plan, TASK, [*chunks(10, 50), last])[0].score
    assert scores["terminated", False] == scores["truncated", False] == pytest.approx(0.0, abs=1e-6)
    assert scores["terminated", True] == pytest.approx(0.0, abs=1e-6)
    assert scores["truncated", True] == pytest.approx(1.6 * 0.9)
    plan.close()


def test_curriculum_reaches_its_end(server: JudgeServer) -> None:
    server.answer = lambda r: (200, completion(json.dumps({"action_score": 0, "progress": brightness(r)})))
    plan = make_plan(server)
    totals = []
    for index in range(3):
        plan.start_iteration(index, 3)
        totals.append(play(plan, TASK, chunks(100))[0].score)
    assert totals == pytest.approx([1.6, 1.6 * 0.55, 1.6 * 0.1])
    plan.close()


@pytest.mark.parametrize("scorer", ["success", "grasp", "affordance"])
def test_scorers_of_one_frame(server: JudgeServer, scorer: str) -> None:
    server.answer = lambda r: (200, completion(json.dumps({scorer: brightness(r)})))
    plan = make_plan(server, vlm_scorer=scorer)
    assert play(plan, TASK, chunks(25, 75))[0].score == pytest.approx(1.6 * 0.75)
    plan.close()


def test_pairwise_compares_with_the_frame_before(server: JudgeServer) -> None:
    def answer(request: dict) -> tuple[int, dict]:
        assert len(request["messages"][0]["content"]) == 3
        return 200, completion(json.dumps({"closer": -1 if brightness(request) < 0.5 else 1}))

    server.answer = answer
    plan = make_plan(server, vlm_scorer="pairwise")
    sample, _ = play(plan, TASK, chunks(70, 20, 80))
    assert sample.rewards.sum(1).tolist() == pytest.approx([1.6, -1.6, 1.6])
    plan.close()


def test_an_episode_is_judged_once_from_sampled_frames(server: JudgeServer) -> None:
    def answer(request: dict) -> tuple[int, dict]:
        assert len(request["messages"][0]["content"]) == 1 + 3
        return 200, completion('Sure: {"score": 4}')

    server.answer = answer
    plan = make_plan(server, vlm_scorer="episode", vlm_episode_frames=3)
    sample, _ = play(plan, TASK, chunks(1, 2, 3, 4, 5, terminated=True))
    assert len(server.requests) == 1 and sample.rewards.flatten().nonzero().flatten().tolist() == [24]
    assert sample.score == pytest.approx(2 * 0.75)
    plan.close()


def test_log_probs(server: JudgeServer) -> None:
    def answer(request: dict) -> tuple[int, dict]:
        assert request["logprobs"] and request["max_tokens"] == 1
        top = [{"token": t, "logprob": math.log(p), "bytes": None} for t, p in (("True", 0.6), (" False", 0.2))]
        return 200, completion("True", logprobs={"content": [{**top[0], "top_logprobs": top}], "refusal": None})

    server.answer = answer
    client = VLMClient(RewardConfig(vlm_url=f"{server.url}/v1", vlm_model="judge", vlm_timeout=120.0))
    assert client.ask(Scorer("logprob"), "t", [np.zeros((2, 2, 3), np.uint8)]).result(300) == Score(pytest.approx(0.75))
    client.close()


FAULTS = {
    "garbage": (200, b"<html>"),
    "no completion": (200, {"hello": 1}),
    "prose": (200, completion("I would say 0.7")),
    "invalid json": (200, completion('{"success": 0.5,')),
    "out of range": (200, completion('{"success": 1.5}')),
    "not a number": (200, completion('{"success": "high"}')),
    "another key": (200, completion('{"progress": 0.5}')),
    "empty": (200, completion("")),
    "no choices": (200, {**completion(""), "choices": []}),
    "429": (429, {"error": "slow down"}),
    "500": (500, {"error": "oops"}),
    "400": (400, {"error": "no such model"}),
    "closed": (200, None),
    "null": (200, b"null"),
    "no message": (200, {**completion(""), "choices": [{"index": 0, "message": None}]}),
    "a null choice": (200, {**completion(""), "choices": [None]}),
    "choices of another type": (200, {**completion(""), "choices": {"0": 1}}),
    "null content": (200, completion(None)),  # type: ignore[arg-type]
    "content in parts": (200, completion(["a"])),  # type: ignore[arg-type]
    "nested deeply": (200, b'{"choices":' * 100_000),
    "content nested deeply": (200, completion('{"success":' * 20_000)),
    "a huge number": (200, completion('{"success": 1e999}')),
    "a huge integer": (200, completion('{"success": 1' + "0" * 5000 + "}")),
    "NaN": (200, completion('{"success": NaN}')),
    "a number in quotes": (200, completion('{"success": "0.5"}')),
    "a truth value": (200, completion('{"success": true}')),
    "a null": (200, completion('{"success": null}')),
    "a list": (200, completion('[{"success": 0.5]')),
    "a lone surrogate": (200, b'{"choices": [{"message": {"content": "\\ud800 {"}}]}'),
    "latin-1": (200, b'{"choices": [{"message": {"content": "\xe9 {}"}}]}'),
    "cut off": (200, completion('{"success": 0.', finish_reason="length")),
    "cut off while reasoning": (200, completion('<think> {"success": 0.9} or', finish_reason="length")),
    "elsewhere": (307, b"", {"Location": "http://127.0.0.2/v1/chat/completions"}),
    "without end": (200, b'{"choices": "' + b"x" * (17 * 2**20)),
}


@pytest.mark.parametrize(
    "text",
    [
        '{"success": 0.25}',
        'I see {a gripper} and {two} cubes. {"success": 0.25}',
        '<think>Perhaps {"success": 0.9}? The set {x} is empty.</think>\n```json\n{"success": 0.25}\n```',
        'Such as {"success": 1}. Mine: {"success": 0.25}. {Done}',
        '{"success": 0.25, "why": {"success": 0.9, "text": "a } brace"}}',
        '<think>{{{</think>{"success": 0.25}}}}',
        '{"answer": 3} {"success": 0.25} {"success": 7}',
    ],
)
def test_the_answer_is_found_among_other_braces(text: str) -> None:
    assert Scorer("success").read(Completion(text)) == Score(0.25)
    assert Scorer("success").read(Completion(text, cut_off=True)) == Score(0.25), "it is complete"


def test_a_cut_off_answer_says_so_and_is_not_asked_for_again(server: JudgeServer) -> None:
    server.answer = lambda request: FAULTS["cut off"]
    config = RewardConfig(vlm_url=f"{server.url}/v1", vlm_model="judge", vlm_retries=3)
    client = VLMClient(config)
    failed = client.ask(Scorer("success"), "t", [np.zeros((2, 2, 3), np.uint8)]).result(300)
    assert failed == FailedAnswer("AnswerCutOff", mock.ANY) and "--vlm_max_tokens" in failed.message
    assert len(server.requests) == 1
    client.close()


def test_invalid_answers_are_asked_for_again(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)
    good = completion('{"success": 0.5}')
    server.answer = lambda request: (200, completion("hm") if len(server.requests) < 3 else good)
    config = RewardConfig(vlm_url=f"{server.url}/v1", vlm_model="judge", vlm_retries=2, vlm_timeout=120.0)
    client = VLMClient(config)
    assert client.ask(Scorer("success"), "t", [np.zeros((2, 2, 3), np.uint8)]).result(300) == Score(0.5)
    metrics = client.take_metrics()
    assert metrics["retries"] == 2 and metrics["failures"] == 0 and metrics["completion_tokens"] == 9
    client.close()


LOG_PROBS = {
    "null": None,
    "a list": [],
    "null content": {"content": None},
    "a null token": {"content": [None]},
    "no number": {"content": [{"token": "True", "logprob": "0", "top_logprobs": []}]},
    "a positive one": {"content": [{"token": "True", "logprob": 1e300, "top_logprobs": None}]},
    "a null candidate": {"content": [{"token": "True", "logprob": 0.0, "top_logprobs": [None]}]},
    "a number as token": {"content": [{"token": 1, "logprob": 0.0, "top_logprobs": []}]},
}


@pytest.mark.parametrize("fault", LOG_PROBS)
def test_log_probs_that_are_none(fault: str) -> None:
    with pytest.raises(AnswerError):
        Scorer("logprob").read(read_completion(completion("True", logprobs=LOG_PROBS[fault])))


@pytest.mark.parametrize("usage", [None, [], {"prompt_tokens": None}, {"prompt_tokens": -1}, {"prompt_tokens": 1e300}])
def test_a_strange_count_of_tokens_is_no_failure(usage: Any) -> None:
    assert read_completion({**completion("a"), "usage": usage}) == Completion("a")


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_a_typed_failure(server: JudgeServer, fault: str) -> None:
    """The window pays 0, the failure is counted, and the iteration's check says what happened."""
    server.answer = lambda request: FAULTS[fault]
    plan = make_plan(server, vlm_scorer="success")
    sample, _ = play(plan, TASK, chunks(25, 50))
    assert not sample.rewards.any() and sample.reward_info["vlm_failed"] == 3
    metrics = plan.metrics()
    assert metrics["reward/vlm_failures"] == metrics["reward/vlm_requests"] == 3
    with pytest.raises(VLMFailuresError, match=r"3 of 3 requests .*--vlm_max_failures 0.2 .*: .*:"):
        plan.check(metrics)
    plan.close()


def test_a_slow_server_costs_its_time_limit_only(server: JudgeServer) -> None:
    release = threading.Event()
    server.answer = lambda request: (release.wait(300), (200, completion('{"success": 1}')))[1]
    plan = make_plan(server, vlm_scorer="success", vlm_timeout=0.5)
    sample, _ = play(plan, TASK, chunks(25, 50))  # no answer comes while it plays: to wait for one would find a score
    assert sample.reward_info["vlm_failed"] == 3
    release.set()
    plan.close()


def test_one_failure_among_many_is_tolerated(server: JudgeServer) -> None:
    def answer(request: dict) -> tuple[int, Any]:
        value = brightness(request)
        return (500, {}) if value == 0.5 else (200, completion(json.dumps({"success": value})))

    server.answer = answer
    plan = make_plan(server, vlm_scorer="success")
    sample, _ = play(plan, TASK, chunks(25, 50, 60, 70, 80))
    assert sample.rewards.sum(1).tolist() == pytest.approx([0.4, 0, 1.6 * 0.35, 0.16, 0.16])
    metrics = plan.metrics()
    assert metrics["reward/vlm_failures"] == 1
    plan.check(metrics)
    server.answer = lambda request: (200, completion('{"success": 0.5}'))
    play(plan, TASK, chunks(25, 50))
    assert plan.metrics()["reward/vlm_requests"] == 1, "a failure is not kept in the cache"
    plan.close()


def test_retries_reach_a_server_that_recovers(server: JudgeServer) -> None:
    server.answer = lambda r: (429, {}) if len(server.requests) < 2 else (200, completion('{"success": 1}'))
    client = VLMClient(RewardConfig(vlm_url=f"{server.url}/v1", vlm_model="judge", vlm_retries=2))
    assert client.ask(Scorer("success"), "t", [np.zeros((2, 2, 3), np.uint8)]).result(300) == Score(1.0)
    assert len(server.requests) == 2 and client.take_metrics()["failures"] == 0
    client.close()


def test_the_rollout_never_waits(server: JudgeServer) -> None:
    """The server holds every answer back until the episode has been played to its end."""
    release = threading.Event()

    def answer(request: dict) -> tuple[int, dict]:
        assert release.wait(300)
        return 200, completion(json.dumps({"success": brightness(request)}))

    server.answer = answer
    plan = make_plan(server, vlm_scorer="success", vlm_concurrency=2)
    rewards = plan.begin(TASK, EpisodeStart(make_observation()))
    scored = [rewards.score_chunk(chunk)["vlm"] for chunk in chunks(10, 20, 30, 40)]
    assert not np.any(scored), "nothing is known yet"
    assert len(server.requests) <= 2, "no more at a time than allowed"
    release.set()
    rewards.end(terminated=False, truncated=True)
    assert rewards.finalize_rewards({}).total.sum() == pytest.approx(1.6 * 0.4) and len(server.requests) == 5
    plan.close()


def test_dynamic_truncation_with_a_judge_that_answers_late(server: JudgeServer) -> None:
    """The episode ends as soon as the answers say that it stands still, and not before there are answers."""
    release, answers = threading.Event(), []

    def answer(request: dict) -> tuple[int, dict]:
        assert release.wait(300)
        return 200, completion(json.dumps({"success": brightness(request)}))

    server.answer = answer
    plan = make_plan(server, vlm_scorer="success", dynamic_truncation=True, truncation_patience=10)
    client = plan.sources["vlm"].server.client
    ask = client.ask
    client.ask = lambda *question: answers.append(ask(*question)) or answers[-1]
    rewards = plan.begin(TASK, EpisodeStart(make_observation()))
    for chunk in chunks(30, 30, 30, 31):
        rewards.score_chunk(chunk)
        assert not rewards.stalled, "nothing was answered"
    release.set()
    for value, stalled in ((30, True), (90, True), (20, False)):
        for result in answers:
            result.result(300)
        rewards.stalled = False
        rewards.score_chunk(*chunks(value))
        assert rewards.stalled == stalled, "what is asked about a chunk is answered after it"
    rewards.end(terminated=False, truncated=True)
    assert rewards.finalize_rewards({}).info["stalled"] == 0, "it went on after all"
    plan.close()


def test_equal_questions_under_way_are_asked_once(server: JudgeServer) -> None:
    release = threading.Event()
    server.answer = lambda request: (release.wait(300), (200, completion('{"success": 0.5}')))[1]
    client = VLMClient(RewardConfig(vlm_url=f"{server.url}/v1", vlm_model="judge", vlm_timeout=120.0))
    image = np.zeros((2, 2, 3), np.uint8)
    asked = [client.ask(Scorer("success"), "t", [image]) for _ in range(5)] + [
        client.ask(Scorer("success"), "another", [image]),
        client.ask(Scorer("success"), "t", [image + 1]),
    ]
    release.set()
    assert {a.result(300) for a in asked} == {Score(0.5)} and len(server.requests) == 3
    client.close()


def test_a_client_that_is_closed_leaves_nothing_behind(server: JudgeServer) -> None:
    asked, release = threading.Event(), threading.Event()
    server.answer = lambda request: (asked.set(), release.wait(300), (200, completion('{"success": 0.5}')))[2]
    client = VLMClient(RewardConfig(vlm_url=f"{server.url}/v1", vlm_model="judge", vlm_timeout=120.0))
    client.ask(Scorer("success"), "t", [np.zeros((2, 2, 3), np.uint8)])
    assert asked.wait(300), "the request is under way"
    client.close()
    assert not any(thread.name == "requests" for thread in threading.enumerate())
    release.set()
    client.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["--vlm_url", "--vlm_model"]),
        ({"vlm_url": "http://127.0.0.1:9", "vlm_model": "m"}, ["--vlm_url http://127.0.0.1:9 does not answer"]),
        (
            {"vlm_url": "x", "vlm_model": "m", "vlm_scorer": "pairwise", "vlm_progress_term": "potential"},
            ["--vlm_progress_term potential has no effect with --vlm_scorer pairwise", "--vlm_url 'x'"],
        ),
        ({"vlm_url": "localhost", "vlm_model": "m"}, ["--vlm_url 'localhost' is not a URL"]),
        ({"vlm_url": "http://127.0.0.1:9", "vlm_prompt": "none.txt"}, ["--vlm_model", "does not answer", "none.txt"]),
    ],
)
def test_configuration_mistakes_all_at_once(options: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        RewardPlan.from_config(RewardConfig(reward=("vlm",), **options))
    assert len(error.value.problems) == len(words)
    assert all(word in problem for word, problem in zip(words, error.value.problems))


@pytest.mark.parametrize(("text", "word"), [("is it done?", "{task}"), ("{task} {0}", "braces"), ("{task", "braces")])
def test_prompts_of_your_own(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        Scorer("success", str(path))
    path.write_text("{task}? {{}}")
    assert Scorer("success", str(path)).prompt("lift") == "lift? {}"


def test_answers_without_log_probs_are_failures() -> None:
    scorer = Scorer("logprob")
    with pytest.raises(AnswerError, match="no log-probs"):
        scorer.read(Completion("True"))
    with pytest.raises(AnswerError, match="neither True nor False"):
        scorer.read(Completion("Perhaps", first_tokens=(("Perhaps", 0.0),)))
    assert FailedAnswer("a", "b") != Score(0.0)

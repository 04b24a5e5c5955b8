"""Own reward functions and remote servers: called with batches beside the rollout, and what can go wrong there."""

from __future__ import annotations

import base64
import io
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rlvla.envs.registry import load_custom_module
from rlvla.rewards import RewardConfig, RewardPlan, remote
from rlvla.rewards.function import RewardFunctionError, load_function
from rlvla.rewards.remote import RemoteRewardError
from rlvla.utils.errors import ConfigError
from rlvla.utils.http import client as http_client
from tests.support.judge_server import JudgeServer, judge_server
from tests.support.reward_cases import make_chunk, make_sample, make_task, play

TASK = make_task()
CHUNKS = [make_chunk([set()] * 2, 3), make_chunk([set()], 3)]


def function_plan(path: Path, source: str, **options) -> RewardPlan:
    path.write_text(source)
    return RewardPlan.from_config(
        RewardConfig.from_flags(reward=("reward_fn:2",), reward_fn=f"{path}:score", **options)
    )


def test_one_number_is_paid_at_the_last_step(tmp_path: Path) -> None:
    plan = function_plan(tmp_path / "mine.py", "def score(samples):\n    return [s.finish_step for s in samples]\n")
    sample, _ = play(plan, TASK, CHUNKS)
    assert sample.reward_components["reward_fn"].tolist() == [[0, 0, 0], [6, 0, 0]]
    plan.close()


def test_one_number_per_step(tmp_path: Path) -> None:
    source = "import numpy as np\ndef score(samples):\n    return [np.arange(s.finish_step) for s in samples]\n"
    plan = function_plan(tmp_path / "mine.py", source)
    assert play(plan, TASK, CHUNKS)[0].rewards.tolist() == [[0, 2, 0], [4, 0, 0]]
    plan.close()


def test_batches_run_beside_the_rollout_and_keep_their_order(tmp_path: Path) -> None:
    """Two calls must be under way at once, or the barrier breaks; the first one ends last."""
    source = """
import threading
barrier, first_is_done = threading.Barrier(2), threading.Event()
sizes = []
def score(samples):
    sizes.append(len(samples))
    if len(samples) == 2:
        barrier.wait(300)
        first_is_done.set() if samples[0].seed else first_is_done.wait(300)
    return [s.seed for s in samples]
"""
    plan = function_plan(tmp_path / "mine.py", source, reward_fn_batch_size=2, reward_fn_workers=2)
    threads = threading.active_count()
    for seed in range(5):
        plan.submit(make_sample({"reward_fn": np.zeros((1, 1))}, [1], seed=seed))
    assert threading.active_count() > threads
    assert [judged["reward_fn"] for judged in plan.collect(5)] == [0, 1, 2, 3, 4]
    assert sorted(plan.sources["reward_fn"]._function.__globals__["sizes"]) == [1, 2, 2]
    assert plan.collect(0) == []
    plan.close()


def test_a_function_that_raises_shows_its_own_traceback(tmp_path: Path) -> None:
    source = (
        "def helper(s):\n    return s.no_such_thing\n\n\ndef score(samples):\n    return [helper(s) for s in samples]\n"
    )
    plan = function_plan(tmp_path / "mine.py", source)
    with pytest.raises(RewardFunctionError) as error:
        play(plan, TASK, CHUNKS)
    text = str(error.value)
    assert "mine.py:score raised AttributeError" in text and "no_such_thing" in text
    assert 'mine.py", line 6, in score' in text and 'mine.py", line 2, in helper' in text
    assert "background.py" not in text and "function.py" not in text, "nothing of ours"
    plan.close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 1.0", "one entry for each of the 1 episodes, not float"),
        ("return []", "not 0"),
        ("return [None]", "gave None for an episode of 3 steps"),
        ("return [float('nan')]", "finite"),
        ("return [[1.0, 2.0]]", "one for each step"),
    ],
)
def test_what_is_no_reward(tmp_path: Path, body: str, words: str) -> None:
    plan = function_plan(tmp_path / "mine.py", f"def score(samples):\n    {body}\n")
    with pytest.raises(RewardFunctionError, match=words):
        play(plan, TASK, CHUNKS)
    plan.close()


def test_a_file_is_a_module_like_any_other(tmp_path: Path) -> None:
    """Dataclasses with postponed annotations look their module up, and so does pickle; it is executed once."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n\n"
        "@dataclass\nclass Weights:\n    near: float = 2.0\n\n\n"
        "def score(samples):\n    return [Weights().near for _ in samples]\n"
    )
    function = load_function(f"{path}:score")
    assert function([None]) == [2.0]
    assert load_function(f"{path}:score") is function
    weights = function.__globals__["Weights"](3.0)
    assert pickle.loads(pickle.dumps(weights)) == weights
    load_custom_module(str(path))
    assert load_function(f"{path}:score") is function, "named twice, it is still one module"


def test_a_file_behind_a_link_shows_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text("def score(samples):\n    return samples.nothing\n")
    (tmp_path / "linked.py").symlink_to(tmp_path / "real.py")
    plan = RewardPlan.from_config(
        RewardConfig.from_flags(reward=("reward_fn",), reward_fn=f"{tmp_path}/linked.py:score")
    )
    with pytest.raises(RewardFunctionError, match="real.py.*line 2") as error:
        play(plan, TASK, CHUNKS)
    assert "function.py" not in str(error.value)
    plan.close()


def test_functions_that_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import nothing_of_that_name\n")
    (tmp_path / "notes.txt").write_text("score\n")
    (tmp_path / "empty.py").write_text("def other(samples):\n    pass\n")
    for spec, words in (
        ("mine.py", "write FILE.py:FUNCTION"),
        (f"{tmp_path}/absent.py:score", "does not exist"),
        (f"{tmp_path}/notes.txt:score", "notes.txt is not a Python file"),
        (f"{path}:score", "(?s)cannot be executed:.*mine.py.*line 1.*nothing_of_that_name"),
        (f"{tmp_path}/empty.py:score", "has no function score; it has: other"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_function(spec)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)
    with judge_server() as running:
        yield running


def remote_plan(server: JudgeServer, **options) -> RewardPlan:
    return RewardPlan.from_config(RewardConfig.from_flags(reward=("remote",), remote_rm_url=server.url, **options))


def test_images_for_the_server_stand_upright() -> None:
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    below = make_sample(
        {"x": np.zeros((1, 1))}, [1], images=torch.from_numpy(image)[None, None], images_flipped_vertically=True
    )
    (sent,) = remote.describe_episode(below, images=True)["images"]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(sent)))), image[::-1])


def test_the_contract_of_the_server(server: JudgeServer) -> None:
    server.answer = lambda request: (200, {"rewards": [e["finish_step"] for e in request["episodes"]]})
    plan = remote_plan(server, remote_rm_images=True)
    sample, _ = play(plan, TASK, CHUNKS)
    assert sample.rewards.tolist() == [[0, 0, 0], [3, 0, 0]]
    (episode,) = server.requests[0]["episodes"]
    known = (
        "suite task_id init_state_id seed uid instruction finish_step success_once success_at_end terminated truncated"
    )
    assert set(episode) == {*known.split(), "images"}
    images = [np.asarray(Image.open(io.BytesIO(base64.b64decode(image)))) for image in episode["images"]]
    assert np.array_equal(np.stack(images), sample.images[:, 0].numpy())
    plan.close()


@pytest.mark.parametrize(
    ("fault", "attempts", "words"),
    [
        ((500, {}), 3, "HTTP status 500"),
        ((429, {}), 3, "HTTP status 429"),
        ((404, {}), 1, "HTTP status 404"),
        ((200, b"<html>"), 3, "MalformedAnswer.*not JSON"),
        ((200, {"reward": [1]}), 3, 'entry "rewards"'),
        ((200, {"rewards": [1, 2]}), 3, "each of the 1 episodes"),
        ((200, {"rewards": ["a"]}), 3, "gave a for an episode"),
        ((200, None), 3, "RemoteDisconnected"),
        ((200, {"rewards": ["1.5"]}), 3, "gave 1.5 for"),
        ((200, {"rewards": [None]}), 3, "gave None for"),
        ((200, {"rewards": [[1.0, None, 2.0]]}), 3, "for an episode"),
        ((200, {"rewards": [1e200]}), 3, "gave 1e\\+200 for"),
        ((200, b'{"rewards": [1' + b"0" * 250 + b"]}"), 3, "for an episode"),
        ((200, b'{"rewards": [1e999]}'), 3, "not a finite number"),
        ((200, b'{"rewards": [NaN]}'), 3, "NaN"),
        ((200, b"[" * 100_000), 3, "nested"),
        ((200, b'{"rewards": "\xe9"}'), 3, "not JSON"),
        ((302, b"", {"Location": "http://127.0.0.2/"}), 1, "another host"),
    ],
)
def test_faults_of_the_server(server: JudgeServer, fault: tuple, attempts: int, words: str) -> None:
    server.answer = lambda request: fault
    # An overloaded server is given half of the time limit, then all of it.
    plan = remote_plan(server, remote_rm_retries=2, remote_rm_timeout=1.0 if fault[0] == 429 else 120.0)
    with pytest.raises(RemoteRewardError, match=words):
        play(plan, TASK, CHUNKS)
    assert len(server.requests) == attempts, "what cannot change is not asked again"
    plan.close()


def test_a_time_limit_and_a_recovery(server: JudgeServer) -> None:
    release = threading.Event()
    server.answer = lambda r: (release.wait(300) if len(server.requests) < 2 else None, (200, {"rewards": [1.5]}))[1]
    plan = remote_plan(server, remote_rm_timeout=1.0, remote_rm_retries=4)
    assert play(plan, TASK, CHUNKS)[0].score == 1.5
    release.set()
    plan.close()


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        RewardPlan.from_config(RewardConfig.from_flags(reward=("remote",), remote_rm_url="http://127.0.0.1:9"))


def test_keyword_arguments_of_a_function(tmp_path: Path) -> None:
    source = "def score(samples, scale, mode='slow'):\n    return [scale * (mode == 'fast') for _ in samples]\n"
    for words in (("scale=1.5", "mode=fast"), ('{"scale": 1.5, "mode": "fast"}',)):
        plan = function_plan(tmp_path / "mine.py", source, reward_fn_kwargs=words)
        assert play(plan, TASK, CHUNKS)[0].score == 3.0
        plan.close()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("scale",), "malformed"),
        (("=1",), "malformed"),
        (('{"scale": 1', ), "malformed"),
        (('{"scale": 1, "scale": 2}',), "malformed"),
        (("scale=1", "scale=2"), "duplicate"),
        (("scale=1", "size=2"), "mismatch"),
        ((), "mismatch"),
    ],
)  # fmt: skip
def test_keyword_arguments_that_do_not_fit(tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        function_plan(tmp_path / "mine.py", "def score(samples, scale):\n    return []\n", reward_fn_kwargs=words)
    assert [(p.flag, p.reason) for p in error.value.problems] == [("reward_fn_kwargs", reason)]


def test_keyword_arguments_without_a_function() -> None:
    with pytest.raises(ConfigError) as error:
        RewardPlan.from_config(RewardConfig.from_flags(reward_fn_kwargs=("scale=1",)))
    assert [(p.flag, p.reason) for p in error.value.problems] == [("reward_fn_kwargs", "no_effect")]


def test_named_numbers_beside_a_reward(tmp_path: Path) -> None:
    source = "def score(samples):\n    return [(2.0, {'speed': s.finish_step, 'fell_2': True}) for s in samples]\n"
    plan = function_plan(tmp_path / "mine.py", source)
    sample, _ = play(plan, TASK, CHUNKS)
    assert sample.score == 4.0, "the weight applies to the reward alone"
    assert sample.reward_info == {"reward_fn_speed": 3.0, "reward_fn_fell_2": 1.0}
    plan.close()


def test_named_numbers_of_a_server(server: JudgeServer) -> None:
    server.answer = lambda request: (200, {"rewards": [[[0, 1, 2], {"speed": 7}] for _ in request["episodes"]]})
    plan = remote_plan(server)
    sample, _ = play(plan, TASK, CHUNKS)
    assert sample.rewards.tolist() == [[0, 1, 0], [2, 0, 0]] and sample.reward_info == {"remote_speed": 7.0}
    plan.close()


@pytest.mark.parametrize(
    "numbers", ["{'a/b': 1}", "{'': 1}", "{3: 1}", "{'x': 'one'}", "{'x': '1'}", "{'x': float('nan')}", "{'x' * 99: 1}"]
)
def test_named_numbers_that_cannot_be_logged(tmp_path: Path, numbers: str) -> None:
    plan = function_plan(tmp_path / "mine.py", f"def score(samples):\n    return [(1.0, {numbers})]\n")
    with pytest.raises(RewardFunctionError, match="named number"):
        play(plan, TASK, CHUNKS)
    plan.close()


@pytest.mark.parametrize("name", ["retries", "timeouts", "seconds"])
def test_names_of_the_counters_are_reserved(tmp_path: Path, server: JudgeServer, name: str) -> None:
    """One metric cannot be a count of all ranks and a mean over episodes."""
    plan = function_plan(tmp_path / "mine.py", f"def score(samples):\n    return [(1.0, {{'{name}': 2}})]\n")
    with pytest.raises(RewardFunctionError, match=name):
        play(plan, TASK, CHUNKS)
    plan.close()
    server.answer = lambda request: (200, {"rewards": [[1.0, {name: 2} if len(server.requests) < 2 else {"x": 2}]]})
    plan = remote_plan(server, remote_rm_retries=1)
    assert play(plan, TASK, CHUNKS)[0].reward_info == {"remote_x": 2.0} and plan.metrics()["reward/remote_retries"] == 1
    plan.close()


def test_names_are_limited_in_number(tmp_path: Path) -> None:
    source = "def score(samples):\n    return [(1.0, {f'n{s.seed}_{i}': 1 for i in range(60)}) for s in samples]\n"
    plan = function_plan(tmp_path / "mine.py", source, reward_fn_batch_size=1)
    for seed, valid in ((0, True), (0, True), (1, False), (0, True)):
        plan.submit(make_sample({"reward_fn": np.zeros((1, 1))}, [1], seed=seed))
        if valid:
            plan.collect(1)
        else:
            with pytest.raises(RewardFunctionError, match="120 different names"):
                plan.collect(1)
    plan.close()

"""Reward sources: success placement, weights, parsing."""

from __future__ import annotations

import numpy as np
import pytest

from rlvla.envs import list_tasks
from rlvla.envs.base import ChunkResult, Observation
from rlvla.rewards import EpisodeRewards, StepInfo, parse_rewards, register_reward, reward_names
from rlvla.rewards import base as base_module
from rlvla.utils.errors import ConfigError

TASK = list_tasks("toy_reach")[0]


def chunk(successes: list[bool], size: int, *, terminated: bool = False, truncated: bool = False) -> ChunkResult:
    """A chunk of `size` actions of which `len(successes)` were executed."""
    n = len(successes)
    return ChunkResult(
        observation=Observation(np.zeros((1, 2, 2, 3), np.uint8), None, "x"),
        steps_executed=n,
        rewards=np.zeros(size, np.float32),
        successes=np.array(successes + [False] * (size - n)),
        terminated=terminated,
        truncated=truncated,
        success_at_end=terminated,
        events=[frozenset({f"step{i}"}) for i in range(n)],
    )


def test_success_pays_once_at_the_terminating_step() -> None:
    rewards = EpisodeRewards({"success": 5.0}, TASK)
    first = rewards.score_chunk(chunk([False, True, True, False], 4))["success"]
    last = rewards.score_chunk(chunk([True, True, True], 4, terminated=True))["success"]
    assert first.tolist() == [0, 0, 0, 0], "touching the goal in passing is not success"
    assert last.tolist() == [0, 0, 5, 0] and last.dtype == np.float32


def test_truncation_is_not_success() -> None:
    rewards = EpisodeRewards({"success": 1.0}, TASK)
    assert not rewards.score_chunk(chunk([True, True], 2, truncated=True))["success"].any()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list:
    monkeypatch.setattr(base_module, "_SOURCES", dict(base_module._SOURCES))
    seen: list = []

    @register_reward("recorder")
    class Recorder:
        def __init__(self, task):
            seen.append(task)

        def step(self, info: StepInfo) -> float:
            seen.append(info)
            return 2.0

        def release(self) -> None:
            seen.append("released")

    return seen


def test_a_registered_source_sees_every_executed_step(recorder: list) -> None:
    assert "recorder" in reward_names()
    rewards = EpisodeRewards(parse_rewards(["success", "recorder:0.5"]), TASK)
    scored = rewards.score_chunk(chunk([False, True], 3, truncated=True))
    rewards.release()
    assert scored["recorder"].tolist() == [1.0, 1.0, 0.0]
    assert recorder == [
        TASK,
        StepInfo(False, False, False, frozenset({"step0"})),
        StepInfo(True, False, True, frozenset({"step1"})),
        "released",
    ]


def test_weights_are_parsed() -> None:
    assert parse_rewards(["success:0.25"]) == {"success": 0.25}
    assert parse_rewards(["success"]) == {"success": 1.0}


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([], ["at least one"]),
        (["sucess:1", "success:x"], ["unknown source 'sucess'; known: success", "finite"]),
        (["success:inf"], ["finite"]),
        (["success:1", "success:2"], ["twice"]),
    ],
)
def test_all_mistakes_at_once(specs: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_rewards(specs)
    assert len(error.value.problems) == len(words)
    for problem, word in zip(error.value.problems, words):
        assert word in problem

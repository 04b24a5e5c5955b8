"""One episode: success that is lost again is counted across the borders of chunks."""

from __future__ import annotations

import numpy as np
import pytest

from rlvla.envs import list_tasks
from rlvla.envs.base import ChunkResult, Observation
from rlvla.rewards import RewardPlan
from rlvla.rollout.episode import Episode, EpisodeRequest, Phase

OBSERVATION = Observation(np.zeros((1, 8, 8, 3), np.uint8), None, "reach")


def play(*chunks: str) -> Episode:
    """Chunks as strings: `1` success, `0` none, `-` not executed."""
    episode = Episode(
        EpisodeRequest("toy_reach", 0, 0, 0, "u"), list_tasks("toy_reach")[0], RewardPlan({"success": 1.0})
    )
    episode.on_observation(OBSERVATION)
    for index, chunk in enumerate(chunks):
        steps, last = len(chunk.rstrip("-")), index == len(chunks) - 1
        held = np.array([c == "1" for c in chunk])
        episode.on_decision(np.zeros(2 * len(chunk), np.int64), np.zeros(2 * len(chunk), np.float32))
        rewards = np.zeros(len(chunk), np.float32)
        episode.on_chunk(ChunkResult(OBSERVATION, steps, rewards, held, False, last, False))
    return episode


@pytest.mark.parametrize(
    ("chunks", "regressions", "once"),
    [
        (("000", "000"), 0, False),
        (("011", "111"), 0, True),
        (("001", "000"), 1, True),
        (("101", "010"), 3, True),
        (("111", "1--"), 0, True),  # an end inside a chunk loses nothing
    ],
)
def test_success_lost_again(chunks: tuple[str, ...], regressions: int, once: bool) -> None:
    sample = play(*chunks).to_sample()
    assert (sample.regressions, sample.success_once) == (regressions, once)


class Ending:
    """A source that fails in a given step, and notes which end it is told of."""

    def __init__(self, fails_at: int | None):
        self.fails_at, self.steps, self.told = fails_at, 0, []

    def create(self, task, episode):
        return self

    @property
    def failed(self) -> bool:
        return self.fails_at is not None and self.steps >= self.fails_at

    def step(self, observation, events, info):
        self.steps += 1
        return 0.0

    def end(self, *, terminated: bool, truncated: bool) -> None:
        self.told.append((terminated, truncated))

    def finish(self):
        return {}

    def release(self) -> None:
        pass


@pytest.mark.parametrize(
    ("fails_at", "limit", "ended"),
    [
        (None, 4, (False, True)),
        (4, None, (True, False)),
        (4, 4, (True, False)),  # what has failed is not truncated: it must not count as if it went on
        (3, 4, (True, False)),
    ],
)
def test_who_ends_an_episode(fails_at: int | None, limit: int | None, ended: tuple[bool, bool]) -> None:
    source = Ending(fails_at)
    plan = RewardPlan({"ending": 1.0}, sources={"ending": source})
    episode = Episode(EpisodeRequest("toy_reach", 0, 0, 0, "u"), list_tasks("toy_reach")[0], plan)
    episode.on_observation(OBSERVATION)
    for executed in (2, 4):
        assert not source.told and episode.phase is Phase.READY
        episode.on_decision(np.zeros(4, np.int64), np.zeros(4, np.float32))
        nothing = np.zeros(2, bool)
        episode.on_chunk(ChunkResult(OBSERVATION, 2, np.zeros(2), nothing, False, executed == limit, False))
    sample = episode.to_sample()
    assert (sample.terminated, sample.truncated) == ended
    assert source.told == [ended], "once, and before the rewards are settled"

"""Model-based success detection: an episode waits for its judge while others continue, and ends by its verdict."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rlvla.envs.base import Observation, TaskSpec
from rlvla.envs.workers.pool import EnvPool
from rlvla.rewards import RewardPlan, SuccessConfig, SuccessSource
from rlvla.rollout import EpisodeRequest, RolloutConfig, RolloutEngine
from tests.support.policies import ScriptedPolicy

KWARGS = {"cameras": ("top",), "image_size": 32, "use_proprio": True, "success_hold_steps": 13}
REQUESTS = [EpisodeRequest("toy_reach", 0, i, i, "g") for i in range(4)]


class Late:
    """Answers the first question once `others` more have been asked, all others at once; success from `at` on."""

    def __init__(self, others: int = 0, at: int = 99):
        self._others, self._at = others, at
        self._first: Future[float] | None = None
        self.asked = 0

    def ask(self, task: TaskSpec, observation: Observation) -> Future[float]:
        answer: Future[float] = Future()
        self.asked += 1
        if self._first is None and self._others:
            self._first = answer
            return answer
        if self._first is not None and self.asked > self._others and not self._first.done():
            self._first.set_result(0.0)
        answer.set_result(float(self.asked >= self._at))
        return answer

    def probability(self, answer: float) -> float | None:
        return answer


class Waiting(Late):
    """Answers only when it is asked to answer all that wait, as a model does that scores frames in batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self._open: list[Future[float]] = []

    def ask(self, task: TaskSpec, observation: Observation) -> Future[float]:
        self._open.append(Future())
        return self._open[-1]

    def answer_waiting(self) -> None:
        waiting, self._open = self._open, []
        self.batches += [len(waiting)] if waiting else []
        for answer in waiting:
            answer.set_result(0.0)


def play(judge: Late, workers: int, *, deterministic: bool = False) -> list:
    plan = RewardPlan({"success": 1.0}, success=SuccessSource(SuccessConfig("vlm"), judge))
    with EnvPool(workers) as pool:
        engine = RolloutEngine(pool, KWARGS, plan, RolloutConfig(deterministic_rollout=deterministic))
        assert engine.success_source == "vlm"
        return engine.run(REQUESTS, ScriptedPolicy(4, 2), temperature=1.0)


def test_an_episode_that_waits_holds_up_no_other() -> None:
    """The first verdict comes only after seven further questions, which the other slot must reach without it."""
    judge = Late(others=7)
    samples = play(judge, 2)
    assert judge.asked == 4 * 3 and [s.finish_step for s in samples] == [12] * 4, "three decisions of four steps each"
    assert not any(s.success_at_end or s.terminated for s in samples) and all(s.truncated for s in samples)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_judge_of_batches_is_given_those_that_wait(deterministic: bool) -> None:
    judge = Waiting()
    samples = play(judge, 2, deterministic=deterministic)
    assert sum(judge.batches) == 12 and len(samples) == 4
    if deterministic:
        assert judge.batches == [2] * 6, "whatever the timing of the workers"


def test_a_verdict_ends_an_episode_and_pays() -> None:
    (first, *others) = play(Late(at=2), 1)
    assert first.terminated and first.success_at_end and first.success_once and first.finish_step == 8
    assert first.rewards.sum() == 1 and first.rewards[1, 3] == 1, "with the step after which the frame was judged"
    assert first.simulator_at_end is False and first.simulator_once is False and first.unanswered == 0
    assert [s.finish_step for s in others] == [4, 4, 4]

"""The thread that plays ahead: order, weights, pauses, ends."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlvla.models.policy import Decision
from rlvla.rollout import EpisodeRequest
from rlvla.rollout.backends.colocated import PolicyCopy
from rlvla.rollout.session import RolloutCancelledError
from rlvla.trainer.ahead import Played, RolloutAhead
from rlvla.trainer.config import AsyncConfig, BatchConfig
from rlvla.utils.errors import RunEnded


class Weight(nn.Module):
    """A policy whose action is its weight."""

    def __init__(self, value: float):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))
        self.register_buffer("offset", torch.tensor(0.0))

    def act(self, images: Any, proprio: Any, instructions: Any) -> Decision:
        return Decision(np.array([float(self.weight + self.offset)]), np.zeros(1), {})


class SlowEngine:
    """Plays "episodes" that end when the test says so; each is the action of the policy at its start and end."""

    stats = "statistics"

    def __init__(self) -> None:
        self.metrics = lambda: {"episodes": 1.0}
        self.rewards, self.begun, self.may_end = self, threading.Event(), threading.Event()
        self.played: list[str] = []

    def start_iteration(self, index: int, total: int) -> None:
        self.iteration = index

    def run(self, requests: Any, policy: PolicyCopy, *, on_episode: Callable, cancelled: Callable, **_: Any) -> Any:
        first = policy.act(None, None, [])
        self.begun.set()
        while not self.may_end.wait(0.01):
            if cancelled():
                raise RolloutCancelledError
        self.played.append(requests[0].uid)
        last = policy.act(None, None, [])
        on_episode(requests[0].uid)
        return [(d.version, float(d.actions[0])) for d in (first, last)]


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine()


@pytest.fixture
def make(engine: SlowEngine) -> Iterator[Callable[..., RolloutAhead]]:
    made: list[RolloutAhead] = []

    def create(**settings: Any) -> RolloutAhead:
        config = AsyncConfig(async_rollout=True, **settings)
        made.append(RolloutAhead(engine, PolicyCopy(Weight(-1.0)), config, BatchConfig()))  # type: ignore[arg-type]
        return made[-1]

    yield create
    for one in made:
        one.close()
        assert one._thread is None or not one._thread.is_alive()


def requests(uid: str) -> list[EpisodeRequest]:
    return [EpisodeRequest("toy_reach", 0, 0, 0, uid)]


@pytest.mark.parametrize("partial", [False, True])
def test_new_weights_wait_for_the_end_of_the_episodes(make: Any, engine: SlowEngine, partial: bool) -> None:
    thread = make(max_staleness=3, partial_rollout=partial)
    thread.publish(Weight(0.5), 0)
    thread.submit(1, requests("first"))
    assert engine.begun.wait(30)
    thread.publish(Weight(1.5), 1)
    thread.submit(2, requests("second"))
    engine.may_end.set()
    seen: list[Any] = []
    first = thread.take(1, seen.append)
    assert first == Played([(0, 0.5), (1, 1.5) if partial else (0, 0.5)], "statistics", {"episodes": 1.0})
    assert thread.take(2, seen.append).samples == [(1, 1.5), (1, 1.5)] and seen == ["first", "second"]
    assert not thread.holds(1) and engine.iteration == 2


def test_episodes_end_while_weights_are_handed_over(make: Any, engine: SlowEngine) -> None:
    """And the next ones begin: handing over may take long."""
    thread = make(max_staleness=3)
    thread.publish(Weight(0.5), 0)
    thread.submit(1, requests("first"))
    thread.submit(2, requests("second"))
    assert engine.begun.wait(30)
    backend, ended = thread._policy, threading.Event()

    def stage(policy: nn.Module, version: int) -> None:
        engine.may_end.set()
        thread.take(1, print)
        thread.take(2, print)
        ended.set()

    backend.stage = stage
    publishing = threading.Thread(target=thread.publish, args=(Weight(1.5), 1), daemon=True)
    publishing.start()
    assert ended.wait(30)
    publishing.join()


def test_weights_are_copied(make: Any, engine: SlowEngine) -> None:
    policy = Weight(0.5)
    thread = make()
    thread.publish(policy, 0)
    engine.may_end.set()
    with torch.no_grad():
        policy.weight.fill_(9.0)
        policy.offset.fill_(9.0)
    assert thread.play(0, requests("a"), print).samples == [(0, 0.5)] * 2
    thread.publish(policy, 0)  # no new version
    assert thread.play(0, requests("b"), print).samples == [(0, 0.5)] * 2
    thread.publish(policy, 1)
    assert thread.play(1, requests("c"), print).samples == [(1, 18.0)] * 2


def test_weights_in_another_precision_are_taken_over_as_they_are() -> None:
    copied = PolicyCopy(Weight(0.5))
    copied.load(Weight(0.25).to(torch.bfloat16), 3)
    assert copied._policy.weight.dtype == torch.bfloat16
    assert (copied.version, float(copied.act(None, None, []).actions[0])) == (3, 0.25)


def test_episodes_have_the_noise_level_of_their_iteration(engine: SlowEngine) -> None:
    """Not of the one in which they are played."""

    class Noisy(Weight):
        def anneal_noise(self, end: float, progress: float) -> None:
            self.offset.fill_(end * progress)

    batch = BatchConfig(num_episodes=20, rollout_batch_size=4, flow_noise_level_end=0.2)
    config = AsyncConfig(async_rollout=True, max_staleness=3)
    thread = RolloutAhead(engine, PolicyCopy(Noisy(0.0)), config, batch)  # type: ignore[arg-type]
    thread.publish(Noisy(0.0), 0)
    engine.may_end.set()
    for iteration in (3, 1):
        thread.submit(iteration, requests("ahead"))
    found = {iteration: thread.take(iteration, print).samples[0][1] for iteration in (1, 3)}
    found[0] = thread.play(0, requests("now"), print).samples[0][1]
    thread.close()
    assert found == pytest.approx({0: 0.0, 1: 0.05, 3: 0.15})


def test_episodes_of_the_current_iteration_come_first(make: Any, engine: SlowEngine) -> None:
    thread = make(max_staleness=3)
    thread.publish(Weight(0.5), 0)
    thread.submit(1, requests("running"))
    assert engine.begun.wait(30)
    thread.submit(2, requests("ahead"))
    waiting = threading.Thread(target=thread.play, args=(0, requests("now"), print))
    waiting.start()
    while len(thread._waiting) < 2:
        pass
    engine.may_end.set()
    waiting.join(30)
    thread.take(2, print)
    assert engine.played == ["running", "now", "ahead"]


def test_an_idle_thread_has_finished_and_begins_nothing(make: Any, engine: SlowEngine) -> None:
    thread = make(max_staleness=3)
    thread.publish(Weight(0.5), 0)
    thread.submit(1, requests("first"))
    thread.submit(2, requests("second"))
    assert engine.begun.wait(30)
    with thread.idle(lambda: bool(engine.may_end.set())):  # asked once nothing more may begin
        assert engine.played == ["first"]
        assert thread._running is None
    thread.take(2, print)
    assert engine.played == ["first", "second"]


def test_a_signal_cancels_what_an_evaluation_would_wait_for(make: Any, engine: SlowEngine) -> None:
    thread = make()
    thread.publish(Weight(0.5), 0)
    thread.submit(1, requests("first"))
    assert engine.begun.wait(30)
    with thread.idle(lambda: True):
        assert not engine.played
    with pytest.raises(RolloutCancelledError):
        thread.take(1, print)


def test_closing_gives_up_what_runs(make: Any, engine: SlowEngine) -> None:
    thread = make()
    thread.publish(Weight(0.5), 0)
    thread.submit(1, requests("first"))
    assert engine.begun.wait(30)
    thread.close()
    assert not engine.played and not thread._thread.is_alive()
    with pytest.raises(RuntimeError, match="after the end of the run"):
        thread.play(0, requests("second"), print)


def test_an_error_on_the_thread_is_raised_where_the_episodes_are_waited_for(
    make: Any, engine: SlowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PolicyCopy) -> None:
        raise MemoryError("no room for the weights")

    thread = make()
    thread.publish(Weight(0.5), 0)
    monkeypatch.setattr(PolicyCopy, "renew", fail)
    with pytest.raises(MemoryError):
        thread.play(0, requests("first"), print)
    monkeypatch.undo()
    engine.may_end.set()
    assert thread.play(0, requests("second"), print).samples, "the thread goes on"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ahead", [True, False])
def test_a_thread_that_was_killed_ends_the_run(make: Any, engine: SlowEngine, ahead: bool) -> None:
    """Between two jobs, where nothing takes its exception."""
    thread = make()
    thread.publish(Weight(0.5), 0)
    engine.may_end.set()
    thread.play(0, requests("first"), print)
    assert thread._thread is not None and thread._thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread._thread.ident), ctypes.py_object(SystemExit))
    if ahead:
        thread.submit(1, requests("second"))
    wait = (lambda: thread.take(1, print)) if ahead else (lambda: thread.play(1, requests("second"), print))
    with pytest.raises(RunEnded, match="the rollout thread has ended"):
        wait()
    with thread.idle(lambda: False):
        pass  # evaluations need no thread

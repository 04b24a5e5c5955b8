"""How many requests a server gets, on a clock that the tests advance."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import pytest

from rlvla.utils.http.window import RequestWindow


@dataclass
class Queue:
    """A server that works on one request at a time, in order, and does not notice that a client has given up."""

    seconds: float
    free_at: float = 0.0
    received: int = 0

    def answers_at(self, now: float) -> float:
        self.received += 1
        self.free_at = max(now, self.free_at) + self.seconds
        return self.free_at


@dataclass
class Simulation:
    """Clients of `RequestWindow` on a simulated clock.

    Attributes:
        window: None for `at_a_time` requests at a time, however slow the server.
        answered: seconds at which requests were answered.
    """

    server: Queue
    window: RequestWindow | None
    at_a_time: int = 32
    limit: float = 10.0
    retries: int = 3
    answered: list[float] = field(default_factory=list)
    start: float = 0.0
    failed: int = 0
    timeouts: int = 0

    def run(self, requests: int) -> None:
        waiting = deque([0] * requests)  # attempts of each
        events: list[tuple[float, int, float, bool, int]] = []
        now, under_way, number = self.start, 0, 0
        while waiting or events:
            while waiting and self._may_start(now, under_way):
                attempt, sent = waiting.popleft(), now
                done = self.server.answers_at(now)
                under_way, number = under_way + 1, number + 1
                if self.window is not None:
                    self.window.started()
                heapq.heappush(events, (min(done, now + self.limit), number, sent, done <= now + self.limit, attempt))
            if waiting and self.window is not None and self.window.circuit_open(now):
                self.failed += len(waiting)
                waiting.clear()
            paused = waiting and self.window is not None and now < self.window.not_before
            if paused and (not events or events[0][0] > self.window.not_before):
                now = self.window.not_before
                continue
            if not events:
                continue
            now, _, sent, in_time, attempt = heapq.heappop(events)
            under_way -= 1
            self._over(now, sent, in_time)
            if not in_time and attempt < self.retries:
                waiting.append(attempt + 1)
            elif not in_time:
                self.failed += 1

    def _may_start(self, now: float, under_way: int) -> bool:
        return under_way < self.at_a_time if self.window is None else self.window.may_start(now)

    def _over(self, now: float, sent: float, in_time: bool) -> None:
        if in_time:
            self.answered.append(now)
        else:
            self.timeouts += 1
        if self.window is None:
            return
        self.window.ended()
        if in_time:
            self.window.answered(now - sent)
        else:
            self.window.overloaded(sent, now)


@pytest.mark.parametrize("seconds", [0.5, 1.5, 3.0])
def test_a_slow_server_is_not_buried(seconds: float) -> None:
    """86 requests, 32 at a time, 10 s each: all are answered, and little of the server's time is wasted."""
    buried = Simulation(Queue(seconds), None)
    buried.run(86)
    careful = Simulation(Queue(seconds), RequestWindow(32, 10.0, 3))
    careful.run(86)
    assert careful.failed == 0 and len(careful.answered) == 86
    assert careful.timeouts <= 6 and careful.server.received <= 92
    assert buried.failed > 60, "what the window is for"
    assert careful.answered[-1] <= 1.1 * 86 * seconds


def test_a_server_that_becomes_slow() -> None:
    window = RequestWindow(32, 10.0, 3)
    server = Queue(0.05)
    Simulation(server, window).run(300)
    assert window.limit == 32, "it kept up"
    server.seconds = 1.5
    slow = Simulation(server, window, start=server.free_at)
    slow.run(86)
    assert slow.failed == 0 and slow.timeouts < 86


def test_an_answer_that_always_takes_long_is_no_queue() -> None:
    """Six seconds for each, however many there are: the server keeps up."""
    window = RequestWindow(16, 10.0, 3)
    for _ in range(30):
        window.started()
        window.ended()
        window.answered(6.0)
    assert window.limit == 16


def test_requests_of_one_setback_count_once() -> None:
    window = RequestWindow(8, 10.0, 3)
    for sent in (0.0, 0.0, 1.0):
        window.overloaded(sent, 10.0)
    assert window.limit == 1 and window.not_before == 15.0 and not window.circuit_open(10.0)
    window.overloaded(15.0, 25.0)
    assert window.not_before == 35.0
    assert not window.may_start(34.9) and window.may_start(35.0)


def test_a_server_that_answers_nothing_is_circuit_open_until_it_is_tried_again() -> None:
    window = RequestWindow(8, 1.0, 2)
    now = 0.0
    for _ in range(3):
        sent, now = max(now, window.not_before), max(now, window.not_before) + 1.0
        window.overloaded(sent, now)
    assert (
        window.circuit_open(now) and not window.circuit_open(window.not_before) and window.may_start(window.not_before)
    )
    window.answered(0.1)
    assert not window.circuit_open(now)


def test_the_server_may_ask_for_a_pause() -> None:
    window = RequestWindow(8, 10.0, 3)
    window.overloaded(0.0, 1.0, pause=7.0)
    assert window.not_before == 8.0
    window.overloaded(9.0, 10.0, pause=1e9)
    assert window.not_before <= 10.0 + 60.0

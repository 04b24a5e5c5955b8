"""Asynchronous JSON client of one server, with time limits, retries and congestion control."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rlvla.utils.http.exchange import (
    MAX_BYTES,
    Exchange,
    MalformedAnswer,
    NoAnswerInTime,
    NoConnection,
    RequestError,
    read_json,
)
from rlvla.utils.http.window import RequestWindow
from rlvla.utils.terminal import printable

T = TypeVar("T")
FIRST_PAUSE = 0.5  # seconds before the first further attempt; doubled each time
_LONGEST_PAUSE = 30.0
_SETBACKS = 2  # that a server may have in a row, at least


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a client.

    Attributes:
        seconds: deadline of an attempt, from connecting to the last byte of the answer.
        retries: further attempts after a failed one.
        at_a_time: maximum concurrent requests; fewer while the server does not keep up.
        max_bytes: size of an answer.
    """

    seconds: float
    retries: int
    at_a_time: int
    max_bytes: int = MAX_BYTES


class JsonClient:
    """Sends JSON and reads JSON; nothing blocks but waiting for a result.

    Args:
        limits: of each request.
        headers: sent with each request.
    """

    def __init__(self, limits: RequestLimits, headers: Mapping[str, str] | None = None):
        self._limits = limits
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._window = RequestWindow(limits.at_a_time, limits.seconds, max(_SETBACKS, limits.retries))
        self._random = random.Random()  # the run's own generator belongs to training
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._alarm: asyncio.TimerHandle | None = None
        self._counts: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()

    def ask(self, url: str, content: Callable[[], Any] | None, read: Callable[[Any], T]) -> Future[T]:
        """Send a request; returns immediately.

        Args:
            url: address.
            content: creates the JSON to POST, on a background thread; None: GET.
            read: converts the answer to the result; any exception means that the answer is malformed.

        Returns:
            The result; its exception is a `RequestError` once no attempt is left.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(url, content, read), self._loop)

    def take_counts(self) -> dict[str, float]:
        """Since the last call: `retries` (attempts after a failed one), `timeouts` (of attempts), `seconds` of all."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(float)
        return {name: counts[name] for name in ("retries", "timeouts", "seconds")}

    def close(self) -> None:
        """Abort all requests and cancel their futures."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _count(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    async def _ask(self, url: str, content: Callable[[], Any] | None, read: Callable[[Any], T]) -> T:
        for attempt in range(self._limits.retries + 1):
            await self._turn()
            if attempt:
                self._count("retries")
            try:
                return await self._attempt(url, content, read)
            except RequestError as error:
                if not error.retry or attempt == self._limits.retries:
                    raise
                if not error.overloaded:  # otherwise all requests pause
                    pause = min(FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE)
                    await asyncio.sleep(pause * self._random.uniform(0.75, 1.25))
        raise AssertionError("unreachable")

    async def _attempt(self, url: str, content: Callable[[], Any] | None, read: Callable[[Any], T]) -> T:
        """One exchange; it leaves the window afterwards."""
        limits, sent = self._limits, self._loop.time()
        exchange = Exchange(url, self._headers, timeout=limits.seconds, max_bytes=limits.max_bytes)

        def work() -> T:
            body = None if content is None else json.dumps(content()).encode()
            answer = read_json(exchange.send(body))
            try:
                return read(answer)
            except RequestError:
                raise
            except Exception as error:  # a foreign answer may break `read` in any way
                raise MalformedAnswer(f"{type(error).__name__}: {printable(str(error), 300)}") from None

        try:
            result = await asyncio.wait_for(self._beside(work), limits.seconds)
        except (TimeoutError, NoAnswerInTime):
            self._count("timeouts")
            self._window.overloaded(sent, self._loop.time())
            raise NoAnswerInTime(f"no complete answer within {limits.seconds:g} s") from None
        except RequestError as error:
            if error.overloaded:
                self._window.overloaded(sent, self._loop.time(), error.pause)
            elif not isinstance(error, NoConnection):
                self._window.answered(self._loop.time() - sent)
            raise
        else:
            self._window.answered(self._loop.time() - sent)
            return result
        finally:
            exchange.abort()
            self._count("seconds", self._loop.time() - sent)
            self._window.ended()
            self._dispatch()

    async def _turn(self) -> None:
        """Wait for the window to admit a request; NoAnswerInTime if the circuit is open."""
        turn = self._loop.create_future()
        self._waiting.append(turn)
        self._dispatch()
        await turn

    def _dispatch(self) -> None:
        """Start waiting requests, first come first served."""
        window, now = self._window, self._loop.time()
        while self._waiting and (window.may_start(now) or window.circuit_open(now)):
            turn = self._waiting.popleft()
            if turn.done():  # cancelled
                continue
            if window.circuit_open(now):
                turn.set_exception(NoAnswerInTime("not sent: the server has stopped answering"))
            else:
                window.started()
                turn.set_result(None)
        if self._waiting and now < window.not_before:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._loop.call_at(window.not_before, self._dispatch)

    async def _beside(self, work: Callable[[], Any]) -> Any:
        """Run `work` on a daemon thread, which does not delay the end of the process if it hangs."""
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()  # giving up does not stop the thread

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name="request", daemon=True).start()
        return await asyncio.wrap_future(result)

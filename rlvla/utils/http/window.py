"""Congestion window and circuit breaker for requests: the window grows while the server keeps up, else falls to 1.

After TCP (Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988): a server often still works on a request that
timed out, so the next one waits behind it, and sending as many again would only add to the queue.
"""

from __future__ import annotations

_FIRST = 4.0  # requests at a time before anything is known about the server
_LONGEST_PAUSE = 60.0  # seconds
_PROMPT = 0.25  # share of the time limit within which an answer shows that there is room for more
_PATIENCE = 1.5  # so does one that took at most this many times the quickest: it waited for no others
_CAUTION = 0.25  # growth per answer above the threshold, for all requests under way together


class RequestWindow:
    """Decides when the next request may be sent. Times are seconds of a monotonic clock.

    Args:
        most: maximum concurrent requests.
        seconds: time limit of an answer.
        setbacks: overloads in a row, without an answer in between, after which the circuit opens.
    """

    def __init__(self, most: int, seconds: float, setbacks: int):
        self._most, self._seconds, self._allowed = most, seconds, setbacks
        self._limit = min(_FIRST, most)
        self._threshold = float(most)  # up to here every answer allows one more
        self._quickest = float("inf")
        self._setbacks = 0
        self._reduced = float("-inf")  # when
        self.under_way = 0
        self.not_before = float("-inf")

    @property
    def limit(self) -> int:
        """Requests that may be under way now."""
        return int(self._limit)

    def circuit_open(self, now: float) -> bool:
        """Whether requests fail unsent: the server has stopped answering, and the next trial is not yet due."""
        return self._setbacks > self._allowed and now < self.not_before

    def may_start(self, now: float) -> bool:
        """Whether the window admits another request."""
        return self.under_way < self.limit and now >= self.not_before

    def started(self) -> None:
        """A request was sent."""
        self.under_way += 1

    def ended(self) -> None:
        """A request has succeeded or failed."""
        self.under_way -= 1

    def answered(self, seconds: float) -> None:
        """The server answered within `seconds`."""
        self._setbacks = 0
        self._quickest = min(self._quickest, seconds)
        if seconds <= max(_PROMPT * self._seconds, _PATIENCE * self._quickest):
            self._limit += 1.0 if self._limit < self._threshold else _CAUTION / self._limit
            self._limit = min(self._limit, self._most)

    def overloaded(self, sent: float, now: float, pause: float | None = None) -> None:
        """The server rejected a request as too many, or did not answer it in time.

        Args:
            sent: when the request was sent; requests sent before the last setback count as part of it.
            now: the current time.
            pause: seconds that the server asks to wait (Retry-After).
        """
        if sent <= self._reduced:
            return
        self._threshold, self._limit, self._reduced = max(1.0, self._limit / 2), 1.0, now
        waits = self._seconds / 2 * 2**self._setbacks if pause is None else pause
        self.not_before = now + min(waits, _LONGEST_PAUSE)
        self._setbacks += 1

"""One HTTP exchange: no answer is trusted to be short, well-formed or from the server that was addressed."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

MAX_BYTES = 16 * 2**20  # of an answer
_BLOCK = 2**16  # bytes per read
_MAX_REDIRECTS = 3
_MAX_DIGITS = 300  # of an integer, which may become a float
_SHOWN = 200  # characters of a foreign text
_RETRIED = (408, 409, 425, 429)  # beside all from 500 on
_OVERLOADED = (429, 503)


class RequestError(Exception):
    """A request that failed.

    Attributes:
        retry: another attempt may succeed.
        overloaded: the server has more to do than it can.
        pause: seconds that the server asks to wait; None if it does not say.
    """

    retry = True
    overloaded = False
    pause: float | None = None


class NoAnswerInTime(RequestError):
    """The answer was not complete when the time was up."""

    overloaded = True


class NoConnection(RequestError):
    """No connection, or one that broke."""


class RedirectRefused(RequestError):
    """A redirect to another host, or one too many."""

    retry = False


class AnswerTooLong(RequestError):
    """More bytes than allowed."""


class MalformedAnswer(RequestError):
    """Not HTTP, not JSON, or not what was asked for."""


class StatusError(RequestError):
    """An HTTP status that means failure.

    Attributes:
        status: the HTTP status.
        words: the beginning of the answer, on one line.
    """

    def __init__(self, status: int, words: str = "", pause: float | None = None):
        super().__init__(f"HTTP status {status}" + (f": {words}" if words else ""))
        self.status, self.words, self.pause = status, words, pause
        self.retry = status in _RETRIED or status >= 500
        self.overloaded = status in _OVERLOADED


def printable(text: str, limit: int = _SHOWN) -> str:
    """The first characters of a foreign text on one line, fit for any terminal and log."""
    words = " ".join(text[: 4 * limit].split())
    return "".join(c if c.isprintable() else "?" for c in words[:limit])


@dataclass(frozen=True)
class Reply:
    """A complete answer: HTTP status, headers (names in lower case), body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Returns every answer as it is: neither redirects nor failures are handled by urllib."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


class Exchange:
    """A request and its answer.

    Args:
        url: where to send it.
        headers: of the request; they are sent to no other host.
        timeout: seconds without a sign of life; the time for the whole is up to the caller, see `abort`.
        max_bytes: of the answer.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout: float, max_bytes: int = MAX_BYTES):
        self._url, self._headers, self._timeout, self._max_bytes = url, dict(headers), timeout, max_bytes
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False

    def send(self, body: bytes | None) -> Reply:
        """POST the body, or GET if it is None; blocks.

        A redirect is followed if it stays on the same host and keeps the method.

        Raises:
            RequestError: no answer, or one that breaks a limit. Any status counts as an answer.
        """
        url = self._url
        for _ in range(_MAX_REDIRECTS + 1):
            reply = self._once(url, body)
            if not 300 <= reply.status < 400 or "location" not in reply.headers:
                return reply
            target = _target(url, reply.headers["location"])
            if body is not None and reply.status not in (307, 308):
                raise RedirectRefused(f"it redirects to {printable(target)} (HTTP status {reply.status})")
            url = target
        raise RedirectRefused(f"it redirects more than {_MAX_REDIRECTS} times")

    def abort(self) -> None:
        """End the exchange from another thread; `send` raises soon."""
        with self._lock:
            self._aborted, used = True, self._socket
        if used is not None:
            with suppress(OSError):  # closed already
                # not SSLSocket.shutdown, which would pull the TLS state from under the reading thread
                socket.socket.shutdown(used, socket.SHUT_RDWR)

    def _once(self, url: str, body: bytes | None) -> Reply:
        request = urllib.request.Request(url, body, self._headers, method="GET" if body is None else "POST")
        opener = urllib.request.build_opener(_AnyStatus(), *self._handlers())
        try:
            with opener.open(request, timeout=self._timeout) as response:
                content = self._read(response)
                headers = {name.lower(): value for name, value in response.headers.items()}
                return Reply(response.status, headers, content)
        except RequestError:
            raise
        except (http.client.HTTPException, urllib.error.HTTPError) as error:
            if isinstance(error, ConnectionError):  # the server hung up without an answer
                raise NoConnection(_said(error)) from None
            raise MalformedAnswer(f"its answer is not HTTP ({_said(error)})") from None
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, TimeoutError):
                raise NoAnswerInTime(f"nothing came for {self._timeout:g} s") from None
            raise NoConnection(_said(reason)) from None
        except ValueError as error:  # a line that http.client cannot parse, an address that is none
            raise MalformedAnswer(f"its answer is not HTTP ({_said(error)})") from None

    def _handlers(self) -> list[Any]:
        """Handlers of urllib that hand their socket to `abort`."""
        exchange = self

        class Plain(urllib.request.HTTPHandler):
            def http_open(self, request: Any) -> Any:
                return self.do_open(cast(Any, partial(exchange._connection, http.client.HTTPConnection)), request)

        class Secure(urllib.request.HTTPSHandler):
            def https_open(self, request: Any) -> Any:
                return self.do_open(cast(Any, partial(exchange._connection, http.client.HTTPSConnection)), request)

        return [Plain(), Secure()]

    def _connection(self, kind: type[http.client.HTTPConnection], *args: Any, **kw: Any) -> http.client.HTTPConnection:
        exchange, connection = self, kind(*args, **kw)
        connect = connection.connect

        def connect_unless_aborted() -> None:
            connect()
            with exchange._lock:
                exchange._socket = connection.sock
                aborted = exchange._aborted
            if aborted:
                connection.close()
                raise NoAnswerInTime("given up while it connected")

        connection.connect = connect_unless_aborted  # type: ignore[method-assign]
        return connection

    def _read(self, response: Any) -> bytes:
        """The body, block by block: http.client's own `read` trusts lengths that the server names."""
        blocks, size = [], 0
        while block := response.read1(_BLOCK):
            size += len(block)
            if self._aborted:
                raise NoAnswerInTime("given up while the answer came")
            if size > self._max_bytes:
                raise AnswerTooLong(f"its answer is longer than {self._max_bytes} bytes")
            blocks.append(block)
        if response.length:
            raise NoConnection(f"its answer was cut short: {response.length} bytes are missing")
        return b"".join(blocks)


def _target(url: str, location: str) -> str:
    """The absolute address of a redirect; RedirectRefused if it is not on the same host."""
    try:
        target = urljoin(url, location)
        if _origin(target) == _origin(url):
            return target
    except ValueError:  # not an address
        pass
    raise RedirectRefused(f"it redirects to another host: {printable(location)}")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _said(error: object) -> str:
    return printable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def accepted(reply: Reply) -> bytes:
    """The body of a reply; StatusError unless its status is 2xx."""
    if 200 <= reply.status < 300:
        return reply.body
    raise StatusError(reply.status, printable(reply.body[:_BLOCK].decode("utf-8", "replace")), _wanted_pause(reply))


def _wanted_pause(reply: Reply) -> float | None:
    try:
        seconds = float(reply.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def read_json(content: bytes) -> Any:
    """A JSON document in UTF-8.

    Raises:
        MalformedAnswer: no JSON, NaN or infinity, integers of absurd length, or nested too deeply.
    """
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_no_number, parse_int=_integer, parse_float=_decimal)
    except (ValueError, RecursionError) as error:
        beginning = printable(content[:_BLOCK].decode("utf-8", "replace"), 80)
        what = "it is nested too deeply" if isinstance(error, RecursionError) else _said(error)
        raise MalformedAnswer(f"its answer is no JSON: {beginning!r} ({what})") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _decimal(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{printable(text, 20)} is too large")
    return number

"""One HTTP exchange with an untrusted server: size and redirects are limited, and another thread can abort it.

Not httpx: its name depends on the release of huggingface_hub that is installed (none, `httpx`, `httpx2`); it needs an
extra package, or fails, where ALL_PROXY names a SOCKS proxy, which urllib ignores; and it waits for the deadline where
a server does not speak HTTP, which urllib reports at once.
"""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.message import Message
from typing import Any
from urllib.parse import urljoin, urlsplit

from rlvla.utils.terminal import printable

MAX_BYTES = 16 * 2**20  # of an answer
_BLOCK = 2**16  # bytes per read
_MAX_REDIRECTS = 3
_MAX_DIGITS = 300  # of an integer, which may become a float
_SHOWN = 200  # characters of a foreign text, in a message
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
    """Not HTTP, not JSON, or not of the expected form."""


class StatusError(RequestError):
    """An HTTP status that means failure.

    Attributes:
        status: the HTTP status.
        beginning: of the answer, on one line.
    """

    def __init__(self, status: int, beginning: str = "", pause: float | None = None):
        super().__init__(f"HTTP status {status}" + (f": {beginning}" if beginning else ""))
        self.status, self.beginning, self.pause = status, beginning, pause
        self.retry = status in _RETRIED or status >= 500
        self.overloaded = status in _OVERLOADED


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPErrorProcessor):
    """Reports the socket of each connection, and returns every answer as it is: no redirects, no HTTPError."""

    def __init__(self, connected: Callable[[socket.socket], None]):
        super().__init__()
        self._connected = connected

    def http_open(self, request: Any) -> Any:
        return self._open(http.client.HTTPConnection, request)

    def https_open(self, request: Any) -> Any:
        return self._open(http.client.HTTPSConnection, request)

    def _open(self, kind: Any, request: Any) -> Any:
        connected = self._connected

        class Connection(kind):
            def connect(self) -> None:
                super().connect()
                connected(self.sock)

        return self.do_open(Connection, request)

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


class Exchange:
    """A request and its answer.

    Args:
        url: address of the server.
        headers: of the request; they are sent to no other host.
        timeout: seconds between two bytes; the deadline of the whole exchange is up to the caller, see `abort`.
        max_bytes: largest answer.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout: float, max_bytes: int = MAX_BYTES):
        self._url, self._headers, self._timeout, self._max_bytes = url, dict(headers), timeout, max_bytes
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False

    def send(self, body: bytes | None) -> bytes:
        """POST the body, or GET if it is None; blocks until the answer is complete and returns its body.

        A redirect is followed if it stays on the same host and keeps the method.

        Raises:
            RequestError: no answer, one that breaks a limit, or a status other than 2xx.
        """
        url = self._url
        for _ in range(_MAX_REDIRECTS + 1):
            status, headers, content = self._once(url, body)
            if 200 <= status < 300:
                return content
            if not 300 <= status < 400 or "location" not in headers:
                raise StatusError(status, _beginning(content, _SHOWN), _retry_after(headers))
            target = _target(url, headers["location"])
            if body is not None and status not in (307, 308):
                raise RedirectRefused(f"it redirects to {printable(target, _SHOWN)} (HTTP status {status})")
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

    def _connected(self, used: socket.socket) -> None:
        with self._lock:
            self._socket = used
            aborted = self._aborted
        if aborted:
            used.close()
            raise NoAnswerInTime("given up while it connected")

    def _once(self, url: str, body: bytes | None) -> tuple[int, Message, bytes]:
        """Status, headers and body of the answer."""
        request = urllib.request.Request(url, body, self._headers, method="GET" if body is None else "POST")
        opener = urllib.request.build_opener(_Handler(self._connected))
        try:
            with opener.open(request, timeout=self._timeout) as response:
                return response.status, response.headers, self._read(response)
        except RequestError:
            raise
        except OSError as error:  # a server that hangs up without an answer included
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, TimeoutError):
                raise NoAnswerInTime(f"nothing came for {self._timeout:g} s") from None
            raise NoConnection(_said(reason)) from None
        except (http.client.HTTPException, ValueError) as error:  # ValueError: a line that http.client cannot parse
            raise MalformedAnswer(f"its answer is not HTTP ({_said(error)})") from None

    def _read(self, response: Any) -> bytes:
        """The body, block by block: http.client's own `read` trusts lengths that the server names."""
        content = bytearray()
        while block := response.read1(_BLOCK):
            content += block
            if self._aborted:
                raise NoAnswerInTime("given up while the answer came")
            if len(content) > self._max_bytes:
                raise AnswerTooLong(f"its answer is longer than {self._max_bytes} bytes")
        if response.length:
            raise NoConnection(f"its answer was cut short: {response.length} bytes are missing")
        return bytes(content)


def _target(url: str, location: str) -> str:
    """The absolute address of a redirect; RedirectRefused if it is not on the same host."""
    try:
        target = urljoin(url, location)
        if _origin(target) == _origin(url):
            return target
    except ValueError:  # not an address
        pass
    raise RedirectRefused(f"it redirects to another host: {printable(location, _SHOWN)}")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    address = urlsplit(url)
    return address.scheme, address.hostname, address.port or {"http": 80, "https": 443}.get(address.scheme)


def _said(error: object) -> str:
    return printable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, _SHOWN)


def _beginning(content: bytes, limit: int) -> str:
    return printable(content[:_BLOCK].decode("utf-8", "replace"), limit)


def _retry_after(headers: Message) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def read_json(content: bytes) -> Any:
    """A JSON document in UTF-8.

    Raises:
        MalformedAnswer: no JSON, NaN or infinity, integers of absurd length, or nested too deeply.
    """
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_finite, parse_int=_integer, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else _said(error)
        raise MalformedAnswer(f"its answer is not JSON: {_beginning(content, 80)!r} ({reason})") from None


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{printable(text, 20)} is not a finite number")
    return number

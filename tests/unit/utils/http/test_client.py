"""Requests to servers that are slow, endless, malformed, elsewhere or overloaded."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import pytest

from rlvla.utils.http import client as http_client
from rlvla.utils.http.client import JsonClient, RequestLimits
from rlvla.utils.http.exchange import (
    AnswerTooLong,
    MalformedAnswer,
    NoAnswerInTime,
    NoConnection,
    RedirectRefused,
    RequestError,
    StatusError,
    read_json,
)
from rlvla.utils.terminal import printable
from tests.support.judge_server import judge_server
from tests.support.raw_server import raw_server, response

WAIT = 120.0  # seconds, on a busy machine
OK = "HTTP/1.1 200 OK\r\n"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)


@pytest.fixture
def clients() -> Iterator[Callable[..., JsonClient]]:
    made: list[JsonClient] = []

    def make(seconds: float = WAIT, retries: int = 0, at_a_time: int = 4, **limits: Any) -> JsonClient:
        made.append(JsonClient(RequestLimits(seconds, retries, at_a_time, **limits)))
        return made[-1]

    yield make
    for client in made:
        client.close()


def same(answer: Any) -> Any:
    return answer


def raw(text: str) -> Callable[[], Iterable[bytes]]:
    return lambda: [text.encode("latin-1")]


def body(content: bytes) -> Callable[[], Iterable[bytes]]:
    return lambda: [response(content)]


FAULTS: dict[str, tuple[Callable[[], Iterable[bytes]], type[RequestError]]] = {
    "nothing": (lambda: [], NoConnection),
    "no http": (raw("SSH-2.0-OpenSSH\r\n"), MalformedAnswer),
    "no status": (raw("HTTP/1.1 OK\r\n\r\n"), MalformedAnswer),
    "status of seven digits": (raw("HTTP/1.1 2000000 OK\r\n\r\n"), MalformedAnswer),
    "a header of a megabyte": (raw(f"{OK}X: {'x' * 2**20}\r\n\r\n"), MalformedAnswer),
    "a thousand headers": (raw(OK + "X: 1\r\n" * 1000 + "\r\n"), MalformedAnswer),
    "no body": (raw(f"{OK}Content-Length: 0\r\n\r\n"), MalformedAnswer),
    "less than its length": (raw(f"{OK}Content-Length: 99\r\n\r\n{{}}"), NoConnection),
    "a negative length": (raw(f"{OK}Content-Length: -7\r\n\r\n"), MalformedAnswer),
    "chunks of no size": (raw(f"{OK}Transfer-Encoding: chunked\r\n\r\nxyz\r\n"), MalformedAnswer),
    "a chunk cut short": (raw(f"{OK}Transfer-Encoding: chunked\r\n\r\nff\r\n{{}}"), RequestError),
    "a chunk of a petabyte": (raw(f"{OK}Transfer-Encoding: chunked\r\n\r\n{'f' * 12}\r\n{{"), RequestError),
    "a body without end": (lambda: chain([OK.encode() + b"\r\n"], repeat(b"x" * 4096)), AnswerTooLong),
    "a length of a terabyte": (
        lambda: chain([f"{OK}Content-Length: {10**12}\r\n\r\n".encode()], repeat(b"x" * 4096)),
        AnswerTooLong,
    ),
    "a chunk of negative size": (
        lambda: chain([f"{OK}Transfer-Encoding: chunked\r\n\r\n-1\r\n".encode()], repeat(b"x" * 4096)),
        AnswerTooLong,
    ),
    "chunks without end": (
        lambda: chain([f"{OK}Transfer-Encoding: chunked\r\n\r\n".encode()], repeat(b"4\r\nxxxx\r\n" * 400)),
        AnswerTooLong,
    ),
    "compressed": (lambda: [response(b"\x1f\x8b\x08\x00", "Content-Encoding: gzip")], MalformedAnswer),
    "latin-1": (body('{"a": "é"}'.encode("latin-1")), MalformedAnswer),
    "utf-16": (body('{"a": 1}'.encode("utf-16")), MalformedAnswer),
    "text": (body(b"<html>"), MalformedAnswer),
    "two documents": (body(b"{}{}"), MalformedAnswer),
    "nested deeply": (body(b"[" * 200_000), MalformedAnswer),
    "objects nested deeply": (body(b'{"a":' * 200_000), MalformedAnswer),
    "not a number": (body(b'{"a": NaN}'), MalformedAnswer),
    "infinite": (body(b'{"a": -Infinity}'), MalformedAnswer),
    "a huge number": (body(b'{"a": 1e999}'), MalformedAnswer),
    "a huge integer": (body(b'{"a": 1' + b"0" * 400 + b"}"), MalformedAnswer),
    "a vast integer": (body(b'{"a": 1' + b"0" * 100_000 + b"}"), MalformedAnswer),
    "304": (lambda: [response(b"", status="304 Not Modified")], StatusError),
    "418": (lambda: [response(b"\x1b[31mred", status="418 I'm a teapot")], StatusError),
    "999": (lambda: [response(b"{}", status="999 ?")], StatusError),
    "elsewhere": (lambda: [response(b"", "Location: http://127.0.0.2/", status="307 x")], RedirectRefused),
    "another port": (lambda: [response(b"", "Location: http://127.0.0.1:1/", status="308 x")], RedirectRefused),
    "another scheme": (lambda: [response(b"", "Location: file:///etc/passwd", status="302 x")], RedirectRefused),
    "nowhere": (lambda: [response(b"", "Location: http://[::1", status="301 x")], RedirectRefused),
    "to itself": (lambda: [response(b"", "Location: /again", status="307 x")], RedirectRefused),
    "as a GET": (lambda: [response(b"", "Location: /again", status="303 x")], RedirectRefused),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_one_kind_of_error(fault: str, clients: Callable[..., JsonClient]) -> None:
    blocks, kind = FAULTS[fault]
    with raw_server(blocks) as server, pytest.raises(kind) as error:
        clients(max_bytes=10**6).ask(server.url, dict, same).result(WAIT)
    assert "\n" not in str(error.value) and str(error.value).isprintable() and len(str(error.value)) < 600


@pytest.mark.parametrize(
    "beginning", ["", "HTTP/1.1 200 OK\r\nX: ", "HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"]
)
def test_a_slow_sender_has_as_long_as_any_other(beginning: str, clients: Callable[..., JsonClient]) -> None:
    """A byte now and then, in the headers or the body, is a sign of life, but no answer."""
    over = threading.Event()

    def drip() -> Iterator[bytes]:
        yield beginning.encode()
        while not over.wait(0.02):
            yield b"x"

    with raw_server(drip) as server:
        with pytest.raises(NoAnswerInTime, match="within 0.3 s"):
            clients(seconds=0.3).ask(server.url, dict, same).result(WAIT)
        assert server.hung_up.wait(WAIT), "the connection is not left open"
        over.set()


def test_redirects_on_the_same_host_keep_the_request(clients: Callable[..., JsonClient]) -> None:
    with judge_server() as server:
        moved = (307, b"", {"Location": "/v1/score/"})
        server.answer = lambda request: moved if server.paths[-1] == "/v1/score" else (200, {"got": request})
        asked = clients().ask(f"{server.url}/v1/score", lambda: {"a": 1}, same)
        assert asked.result(WAIT) == {"got": {"a": 1}} and server.paths == ["/v1/score", "/v1/score/"]


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [((500, {}), 3), ((429, {}, {"Retry-After": "0"}), 3), ((404, {}), 1), ((200, b"{"), 3), ((200, {"bad": 1}), 3)],
)
def test_what_is_asked_again(fault: tuple, attempts: int, clients: Callable[..., JsonClient]) -> None:
    """What cannot change is not; an answer that `read` refuses is like any other failure."""
    with judge_server() as server:
        server.answer = lambda request: fault
        client = clients(retries=2)
        with pytest.raises(RequestError):
            client.ask(server.url, dict, lambda answer: answer["good"]).result(WAIT)
        assert len(server.requests) == attempts and client.take_counts()["retries"] == attempts - 1


def test_a_server_that_recovers(clients: Callable[..., JsonClient]) -> None:
    with judge_server() as server:
        server.answer = lambda request: (200, b"{" if len(server.requests) < 3 else {"a": 1})
        client, drawn = clients(retries=2), random.getstate()
        assert client.ask(server.url, dict, same).result(WAIT) == {"a": 1}
        assert client.take_counts()["retries"] == 2 and client.take_counts()["retries"] == 0
        assert random.getstate() == drawn, "the random numbers of a run do not depend on its servers"


def test_no_more_at_a_time_than_allowed(clients: Callable[..., JsonClient]) -> None:
    running, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def answer(request: dict) -> tuple[int, dict]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(WAIT)
        with lock:
            running -= 1
        return 200, {}

    with judge_server() as server:
        server.answer = answer
        client = clients(at_a_time=2)
        for result in [client.ask(server.url, dict, same) for _ in range(8)]:
            result.result(WAIT)
    assert most == 2


def test_a_silent_server_is_given_up_for_all(clients: Callable[..., JsonClient]) -> None:
    """After some setbacks in a row those that wait fail unsent, instead of one time limit after the other."""
    with judge_server() as server:
        release = threading.Event()
        server.answer = lambda request: (release.wait(WAIT), (200, {}))[1]
        client = clients(seconds=0.2, retries=2, at_a_time=2)
        failed = [client.ask(server.url, dict, same) for _ in range(60)]
        errors = [result.exception(WAIT) for result in failed]
        release.set()
    assert all(isinstance(error, NoAnswerInTime) for error in errors)
    assert sum("not sent" in str(error) for error in errors) >= 50 and len(server.requests) <= 6


def test_closing_gives_up_what_is_under_way(clients: Callable[..., JsonClient]) -> None:
    asked, release = threading.Event(), threading.Event()
    with judge_server() as server:
        server.answer = lambda request: (asked.set(), release.wait(WAIT), (200, {}))[2]
        client = clients()
        result = client.ask(server.url, dict, same)
        assert asked.wait(WAIT)
        client.close()
        release.set()
        assert result.cancelled()
        client.close()


def test_a_mistake_in_the_request_is_no_fault_of_the_server(clients: Callable[..., JsonClient]) -> None:
    with pytest.raises(ZeroDivisionError):
        clients().ask("http://127.0.0.1:9", lambda: 1 / 0, same).result(WAIT)


def test_numbers_of_ordinary_size() -> None:
    assert read_json(b'{"a": [1, -2.5, 1e300, 12345678901234567890, true, null, "\xc3\xa9"]}') == {
        "a": [1, -2.5, 1e300, 12345678901234567890, True, None, "é"]
    }


def test_foreign_text_is_fit_for_a_terminal() -> None:
    assert printable("\x1b[31mred\r\n\tgreen\x00 \ud800 \u202e", 200) == "?[31mred green? ? ?"
    assert len(printable("x" * 10**6, 50)) == 50

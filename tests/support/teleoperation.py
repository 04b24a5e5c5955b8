"""The page of a teleoperation without a browser: its messages, and a person in a thread."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect


@contextmanager
def person(capsys: pytest.CaptureFixture, play: Callable[[str], None]) -> Iterator[None]:
    """Within the block, a thread waits for the address that a command prints, and calls `play` with it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            out = ""
            while (address := re.search(r"open: (http://\S+)", out)) is None:
                out += capsys.readouterr().out
                time.sleep(0.01)
            play(address[1])
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)  # ends the command

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(60)
    assert not errors, errors


def open_socket(address: str) -> ClientConnection:
    """Open the page at an address, and its WebSocket, as a browser does."""
    origin = address.partition("/?")[0]
    page = urllib.request.urlopen(address, timeout=20).read().decode()
    key = page.partition("/socket?key=")[2].partition("`")[0]
    return connect(f"ws{origin[4:]}/socket?key={key}", origin=origin, proxy=None)


def send(page: ClientConnection, kind: str, **content: Any) -> None:
    """Send a message of the page."""
    page.send(json.dumps({"type": kind, **content}))


def tap(page: ClientConnection, *names: str) -> None:
    """Press controls and let go of them."""
    send(page, "controls", held=dict.fromkeys(names, 1))
    send(page, "controls", held={})


def state_where(page: ClientConnection, **expected: Any) -> dict[str, Any]:
    """The next state with these values."""
    end, state = time.monotonic() + 20, None
    while time.monotonic() < end:
        message = page.recv(timeout=20)
        if isinstance(message, str):
            state = json.loads(message)
            if all(state.get(name) == value for name, value in expected.items()):
                return state
    raise AssertionError((expected, state))

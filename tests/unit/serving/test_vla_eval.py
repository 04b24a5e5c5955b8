"""vla-eval's protocol: the server plays its chunks, one action for each observation."""

from __future__ import annotations

import io
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

import msgpack
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.support.policy_server import Running, serving


@pytest.fixture(scope="module")
def server(policy_folder: Path) -> Iterator[Running]:
    with serving(policy_folder, temperature=1.0) as run:
        yield run


def open_client(run: Running) -> Any:
    return connect(f"{run.url}/vla-eval", compression=None, proxy=None)


def send(client: Any, kind: str, payload: Any, seq: int = 0) -> None:
    client.send(msgpack.packb({"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0}))


def ask(client: Any, kind: str, payload: Any, seq: int = 0) -> dict[str, Any]:
    send(client, kind, payload, seq)
    return msgpack.unpackb(client.recv(timeout=20))


def observation(camera: str = "top", size: int = 64) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), 90, np.uint8)).save(file, "PNG")
    image = {"__image__": True, "format": "png", "data": file.getvalue(), "shape": [size, size, 3]}
    state = {"__ndarray__": True, "data": np.zeros(2, np.float32).tobytes(), "dtype": "<f4", "shape": [2]}
    return {"images": {camera: image}, "state": state, "task_description": "reach the target"}


def play(client: Any, steps: int, task: str = "reach") -> np.ndarray:
    send(client, "episode_start", {"task": {"name": task}})
    actions = []
    for step in range(steps):
        answer = ask(client, "observation", observation(), seq=step + 7)
        assert answer["type"] == "action" and answer["seq"] == step + 7
        actions.append(np.frombuffer(answer["payload"]["actions"]["data"], "<f4"))
    send(client, "episode_end", {})
    return np.stack(actions)


def test_episodes_repeat_and_share_decisions(server: Running) -> None:
    with open_client(server) as client:
        hello = ask(client, "hello", {"protocol_version": 1}, seq=3)
        assert hello["type"] == "hello" and hello["seq"] == 3 and hello["payload"]["protocol_version"] == 1
        assert hello["payload"]["observation"]["images/top"] == "uint8 [64, 64, 3]"
        before = server.server._batcher.counts.decisions
        first = play(client, 6)
        assert first.shape == (6, 2) and server.server._batcher.counts.decisions - before == 2, "chunks of 4"
        np.testing.assert_array_equal(play(client, 6), first)
        assert not np.array_equal(play(client, 6, task="other"), first)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (observation("left"), "lacks images/top"),
        (observation(size=32), "images/top (uint8 [32, 32, 3])"),
        ({"images": 3}, "lacks images/top"),
    ],
)
def test_a_wrong_observation_is_an_error_message(server: Running, payload: Any, says: str) -> None:
    with open_client(server) as client:
        answer = ask(client, "observation", payload, seq=5)
        assert answer["type"] == "error" and answer["seq"] == 5
        assert says in answer["payload"]["error"] and "needed: images/top" in answer["payload"]["error"]
        assert ask(client, "observation", observation())["type"] == "action", "the connection goes on"


@pytest.mark.parametrize("message", ["text", msgpack.packb([1]), msgpack.packb({"type": "x", "payload": {}, "seq": 0})])
def test_other_messages_end_the_connection(server: Running, message: Any) -> None:
    with open_client(server) as client:
        client.send(message)
        assert isinstance(client.recv(timeout=20), str)
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=20)
        assert closed.value.rcvd.code == 1011


def test_health(server: Running) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=20) as answer:
        assert answer.read() == b'{"status": "ok"}\n' and answer.headers["Content-Type"] == "application/json"

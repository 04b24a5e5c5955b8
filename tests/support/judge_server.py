"""A small HTTP server for tests: it answers chat completions and reward requests, or misbehaves as instructed."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from rlvla.rewards.vlm import server_check


class JudgeServer:
    """Records requests; `answer` decides on each.

    Attributes:
        answer: takes the request's JSON, returns (status, body) or (status, body, headers). The body is bytes, sent as
            they are, or an object to be sent as JSON; None closes the connection without an answer.
        requests: what was asked, the list of models left out.
        list_models: answers the list of models.
        paths: of all requests, in order.
    """

    def __init__(self) -> None:
        self.answer: Callable[[dict], tuple] = lambda request: (200, completion('{"success": 0.5}'))
        self.list_models: Callable[[], tuple[int, Any]] = lambda: (200, models("judge", "m"))
        self.requests: list[dict] = []
        self.paths: list[str] = []
        self._lock = threading.Lock()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with judge._lock:
                    judge.requests.append(request)
                    judge.paths.append(self.path)
                self.reply(*judge.answer(request))

            def do_GET(self) -> None:
                with judge._lock:
                    judge.paths.append(self.path)
                self.reply(*judge.list_models())

            def reply(self, status: int, body: Any, headers: Mapping[str, str] = MappingProxyType({})) -> None:
                if body is None:
                    self.close_connection = True
                    return
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                with suppress(ConnectionError):  # the client may have given up
                    self.send_response(status)
                    for name, value in {"Content-Type": "application/json", **headers}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    # It looks this often whether it is to end: by default every half second, which is longer than most tests take.
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


def completion(content: str, **choice: Any) -> dict[str, Any]:
    """A chat completion."""
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}, **choice}
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13},
    }


def models(*names: str) -> dict[str, Any]:
    """A list of models."""
    return {"object": "list", "data": [{"id": n, "object": "model", "created": 0, "owned_by": "me"} for n in names]}


def of_start_check(request: dict) -> bool:
    """Whether a request is one of those that are sent before training."""
    return server_check.TASK in json.dumps(request) or "Hello" in json.dumps(request)


VALID = {
    "progress": {"action_score": 0, "progress": 0},
    "success": {"success": 0},
    "grasp": {"grasp": 0},
    "contact": {"contact": 0},
    "affordance": {"affordance": 0},
    "pairwise": {"closer": 0},
    "episode": {"score": 1},
    "proposition": {"answer": "no"},
}


def question_of(request: dict) -> str:
    """Name of the question, from the schema of its answer."""
    return request["response_format"]["json_schema"]["name"]


def prompt_of(request: dict) -> str:
    return request["messages"][0]["content"][0]["text"]


def images_of(request: dict) -> list[np.ndarray]:
    """The images [H, W, 3] of a request."""
    urls = [part["image_url"]["url"] for part in request["messages"][0]["content"][1:]]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))) for url in urls]


def judging(**rules: Callable[[dict], dict]) -> Callable[[dict], tuple[int, Any]]:
    """Answers each question by its rule, which takes the request and returns the JSON; others as in `VALID`."""

    def answer(request: dict) -> tuple[int, Any]:
        name = question_of(request)
        return 200, completion(json.dumps(rules[name](request) if name in rules else VALID[name]))

    return answer

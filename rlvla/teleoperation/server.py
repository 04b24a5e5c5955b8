"""The page of a teleoperation, and the loop between its controls and the simulator.

`GET /?token=TOKEN` is answered once, with the page. The page opens one WebSocket, on which it sends JSON messages:

- `{"type": "controls", "held": {NAME: VALUE}}` at every change, and every 0.2 s while a control is held or a policy
  plays;
- `{"type": "speed", "value": 0.5}`; `keep`, `discard`, `restart` (the same initial state), `finish`;
- `play` and `pause`: a policy acts while no control is held, or does not.

It receives `hello` (cameras, controls) and `state` as JSON, and each picture as the camera's index (one byte) and a
JPEG file. A page that is closed, lost or silent releases all controls and pauses the policy; a closed one is replaced
by a new address.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import json
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from rlvla.teleoperation.controls import Controls
from rlvla.teleoperation.session import Phase, Session
from rlvla.utils.terminal import log
from rlvla.utils.video import upright

HOST = "127.0.0.1"
_POLICY_VIOLATION = 1008  # close code
_LARGEST_MESSAGE = 16_384  # bytes
_SILENCE_SECONDS = 1.0  # without a message while a control is held: the page hangs, the control is released
_OPEN_SECONDS = 10.0  # from the page to its WebSocket
_QUALITY = 85  # of the JPEG pictures
_CLOSED = "the page was closed: the robot has stopped"
_SILENT = "no sign of the page: the robot has stopped"
_ORDERS = ("keep", "discard", "restart", "finish")
_POLICY, _PERSON = "policy", "you"  # who acts, on the page
_OPENED = (
    "This address has been opened before",
    "It works once, so that nobody else commands the robot. Go on in the page that is open; when that is closed, "
    "the terminal shows a new address.",
)
_NO_TOKEN = ("This address lacks the token", "Open the address that the terminal shows, with its token.")


class MessageError(ValueError):
    """A message that the page does not send."""


class TeleoperationServer:
    """Serves the page to one person at a time, and steps the simulator as it commands.

    Args:
        session: the episodes.
        controls: turns held controls into actions.
        cameras: their names, in the order of the images.
        announce: called with each address at which the page can be opened.
        clock: step with zero actions while no control is held, from the first control of an episode on.
        wanted: number of kept episodes after which to end; None: until `finish`.

    Attributes:
        address: where the page can be opened; None while it is open.
    """

    def __init__(
        self,
        session: Session,
        controls: Controls,
        cameras: Sequence[str],
        announce: Callable[[str], None],
        *,
        clock: bool = False,
        wanted: int | None = None,
    ):
        self._session, self._controls, self._cameras = session, controls, list(cameras)
        self._announce, self._clock, self._wanted = announce, clock, wanted
        self._port = 0
        self._token: str | None = None
        self._used: set[str] = set()
        self._key: str | None = None  # of the WebSocket of the page that was served
        self._connection: ServerConnection | None = None
        self._orders: deque[str] = deque()
        self._changed = asyncio.Event()
        self._heard = 0.0  # time of the last message
        self._moved = False  # a control was used in this episode
        self._playing = False  # the policy acts while no control is held
        self._actor = ""  # of the latest step
        self._commanded: np.ndarray | None = None  # by the policy, at the latest step
        self._message = ""
        self._ended = False

    @property
    def address(self) -> str | None:
        """See the class."""
        return None if self._token is None else f"http://{HOST}:{self._port}/?token={self._token}"

    async def run(
        self, listener: socket.socket, stop: asyncio.Event, started: Callable[[], None] | None = None
    ) -> None:
        """Serve until `stop` is set, the person finishes, or enough episodes are kept.

        Args:
            listener: a bound socket, which is closed at the end.
            stop: ends the server.
            started: called once, when the page can be opened.
        """
        self._port = listener.getsockname()[1]
        quiet = logging.getLogger(f"{__name__}.websockets")
        quiet.setLevel(logging.CRITICAL)  # a browser's mistakes are not logged with a traceback
        tasks = [asyncio.create_task(self._drive()), asyncio.create_task(stop.wait())]
        try:
            async with serve(
                self._connected,
                sock=listener,
                process_request=self._admit,
                compression=None,
                max_size=_LARGEST_MESSAGE,
                close_timeout=1.0,
                logger=quiet,
            ):
                if started is not None:
                    started()
                self._renew()
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self._ended = True
                if self._connection is not None:
                    await self._send_state("finished: the page can be closed")
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await tasks[0]

    # ------------------------------------------------------------------------------------------------------ HTTP
    def _renew(self) -> None:
        self._key, self._token = None, secrets.token_urlsafe(16)
        self._announce(f"http://{HOST}:{self._port}/?token={self._token}")

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer HTTP requests; None for the WebSocket of the page."""
        address = urlsplit(request.path)
        query = parse_qs(address.query)
        if address.path == "/socket":
            origin = request.headers.get("Origin")
            own = origin == f"http://{request.headers.get('Host')}"  # a forwarded port may have another number
            if own and self._key is not None and _is_equal(query.get("key"), self._key):
                self._key = None
                return None
            return _respond(connection, HTTPStatus.FORBIDDEN, _text_page(*_NO_TOKEN))
        if address.path != "/":
            return _respond(connection, HTTPStatus.NOT_FOUND, _text_page("There is nothing here", _NO_TOKEN[1]))
        token = query.get("token")
        if self._token is not None and _is_equal(token, self._token):
            self._used.add(self._token)
            self._token, self._key = None, secrets.token_urlsafe(16)
            asyncio.get_running_loop().call_later(_OPEN_SECONDS, self._renew_unless_open, self._key)
            page = files("rlvla.teleoperation").joinpath("page.html").read_text(encoding="utf-8")
            return _respond(connection, HTTPStatus.OK, page.replace("@KEY@", self._key))
        if token and token[0] in self._used:
            return _respond(connection, HTTPStatus.GONE, _text_page(*_OPENED))
        return _respond(connection, HTTPStatus.FORBIDDEN, _text_page(*_NO_TOKEN))

    def _renew_unless_open(self, key: str) -> None:
        """A new address if a page was served that did not open its WebSocket."""
        if self._key == key:
            self._renew()

    # -------------------------------------------------------------------------------------------------- WebSocket
    async def _connected(self, connection: ServerConnection) -> None:
        self._connection, self._heard = connection, time.monotonic()
        try:
            await connection.send(json.dumps(self._hello()))
            if self._session.observation is not None:
                await self._send_pictures(await asyncio.to_thread(self._encode))
            await self._send_state("")
            async for message in connection:
                self._heard = time.monotonic()
                self._receive(message)
                self._changed.set()
        except ConnectionClosed:
            pass
        except MessageError as error:
            await connection.close(_POLICY_VIOLATION, str(error))
        finally:
            self._connection = None
            self._stop(with_zero_action=self._clock or self._playing)
            self._changed.set()
            if not self._ended:
                log.warning(_CLOSED)
                self._renew()

    def _hello(self) -> dict[str, Any]:
        return {
            "type": "hello",
            "cameras": self._cameras,
            "bindings": [asdict(binding) for binding in self._controls.bindings],
            "clock": self._clock,
            "policy": self._session.pilot is not None,
        }

    def _receive(self, message: str | bytes) -> None:
        try:
            content = json.loads(message)
            kind = content["type"]
            if kind == "controls":
                held = {str(name): float(value) for name, value in content["held"].items()}
                if not all(0 <= value <= 1 for value in held.values()):
                    raise ValueError("controls lie in [0, 1]")
                self._controls.hold(held)
                self._moved = self._moved or self._controls.active
            elif kind == "speed":
                speed = float(content["value"])
                if not 0 < speed <= 1:
                    raise ValueError("the speed lies in (0, 1]")
                self._controls.speed = speed
            elif kind in ("play", "pause") and self._session.pilot is not None:
                self._playing, self._commanded, self._message = kind == "play", None, ""
            elif kind in _ORDERS:
                self._orders.append(kind)
            else:
                raise ValueError(f"no message of type {kind}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise MessageError(f"invalid message: {type(error).__name__}") from error

    async def _send_pictures(self, pictures: Sequence[bytes]) -> None:
        for picture in pictures:
            if self._connection is not None:
                with suppress(ConnectionClosed):
                    await self._connection.send(picture)

    async def _send_state(self, message: str) -> None:
        session, self._message = self._session, message
        action = self._controls.action() if self._commanded is None else self._commanded
        state = {
            "type": "state",
            "phase": session.phase.value,
            "task": session.task.name,
            "instruction": "" if session.observation is None else session.observation.instruction,
            "step": session.steps,
            "max_steps": session.task.max_steps,
            "success": session.success,
            "message": message or session.message,
            "kept": sum(session.kept.values()),
            "wanted": self._wanted,
            "action": [round(float(value), 4) for value in action],
            "limit": session.task.action_limit,
            "speed": self._controls.speed,
            "playing": self._playing,
            "actor": self._actor,
            "interventions": session.interventions,
        }
        if self._connection is not None:
            with suppress(ConnectionClosed):
                await self._connection.send(json.dumps(state))

    def _encode(self) -> list[bytes]:
        """The pictures of the latest observation."""
        from PIL import Image

        assert self._session.observation is not None
        pictures = []
        for index, image in enumerate(
            upright(self._session.observation.images, self._session.task.images_flipped_vertically)
        ):
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "JPEG", quality=_QUALITY)
            pictures.append(bytes([index]) + buffer.getvalue())
        return pictures

    # -------------------------------------------------------------------------------------------------- simulator
    async def _drive(self) -> None:
        """Execute orders, and steps while the person commands them, one after another."""
        await self._execute(self._session.begin)
        while self._wanted is None or sum(self._session.kept.values()) < self._wanted:
            begin = time.monotonic()
            if self._orders:
                order = self._orders.popleft()
                if order == "finish":
                    return
                await self._obey(order)
            elif self._moves():
                await self._step()
                await asyncio.sleep(max(0.0, begin + 1 / self._session.task.control_freq - time.monotonic()))
            elif not self._orders:  # `_moves` may order a stop
                self._changed.clear()
                await self._send_state(self._message)
                # Not `wait_for`, which in Python 3.11 ignores a cancellation that comes with the event.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SILENCE_SECONDS):
                        await self._changed.wait()

    def _moves(self) -> bool:
        """Whether to execute a step now; releases the controls of a page that is silent, and between episodes."""
        if self._connection is None or self._session.phase is not Phase.PLAYING:
            self._stop()
            return False
        if (self._controls.active or self._playing) and time.monotonic() - self._heard > _SILENCE_SECONDS:
            self._stop(with_zero_action=self._playing)
            self._message = _SILENT
        return self._controls.active or self._playing or (self._clock and self._moved)

    def _stop(self, *, with_zero_action: bool = False) -> None:
        """Release the controls and pause the policy; a robot may still move as it was commanded last."""
        self._controls.release()
        self._playing, self._commanded = False, None
        if with_zero_action:
            self._orders.append("stop")

    async def _step(self) -> None:
        """Execute an action: of the person while a control is held, else of the policy if it plays."""
        session, pilot = self._session, self._session.pilot
        if pilot is not None and self._playing and not self._controls.active:
            await asyncio.to_thread(session.decide)
            if not self._moves():  # paused or closed meanwhile
                return
        if pilot is not None and self._playing and not self._controls.active:
            self._actor, self._commanded = _POLICY, pilot.take()
            self._controls.follow(self._commanded)
            await self._execute(partial(session.step, self._commanded))
        else:
            self._actor, self._commanded = _PERSON, None
            await self._execute(partial(session.step, self._controls.take(), intervention=True))

    async def _obey(self, order: str) -> None:
        session = self._session
        if order == "stop":
            if session.pilot is not None:
                session.pilot.release()
            if session.phase is Phase.PLAYING and session.steps:
                await self._execute(partial(session.step, self._controls.take()), self._message)
            return
        if order == "keep" and (problem := session.keep_problem):
            await self._send_state(problem)
            return
        self._stop()
        self._controls.begin()
        self._actor = ""
        await self._execute({"keep": session.keep, "discard": session.begin, "restart": session.restart}[order])
        self._moved = self._controls.active

    async def _execute(self, work: Callable[[], Any], message: str = "") -> None:
        """Call a method of the session in a thread, and send what there is to see then."""

        def work_and_encode() -> list[bytes]:
            work()
            return [] if self._session.observation is None else self._encode()

        await self._send_pictures(await asyncio.to_thread(work_and_encode))
        await self._send_state(message)


def _is_equal(given: list[str] | None, expected: str) -> bool:
    return given is not None and hmac.compare_digest(given[0].encode(), expected.encode())


def _respond(connection: ServerConnection, status: HTTPStatus, page: str) -> Response:
    response = connection.respond(status, page)
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "text/html; charset=utf-8"
    response.headers["Cache-Control"] = "no-store"
    response.headers["Referrer-Policy"] = "no-referrer"
    response.headers["Content-Security-Policy"] = (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return response


def _text_page(title: str, text: str) -> str:
    style = "body{font:16px/1.5 system-ui,sans-serif;max-width:36rem;margin:15vh auto;padding:0 1rem}"
    return f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{style}</style><h1>{title}</h1><p>{text}'

"""A policy server with openpi's protocol, and with vla-eval's on /vla-eval (see `rlvla.serving.vla_eval`).

On connecting a client receives a map of metadata; each binary message is a map with an observation, answered by a map
with `actions` [H, D] and `server_timing`. After a mistake the client receives a text frame that explains it, and the
connection is closed with code 1011. `GET /healthz` answers OK, `GET /metrics` counters in Prometheus' text format.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import numpy as np
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from rlvla.models.policy import RolloutPolicy
from rlvla.serving import vla_eval
from rlvla.serving.batches import DecisionBatcher
from rlvla.serving.config import ServeConfig
from rlvla.serving.messages import MessageError, pack, unpack
from rlvla.serving.observations import EpisodeNoise, ObservationReader
from rlvla.utils.terminal import printable

log = logging.getLogger(__name__)

_ERROR, _GOING_AWAY = 1011, 1001  # close codes
_HANDSHAKE_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_PING_SECONDS = 20.0
_PONG_SECONDS = 60.0  # a robot's program may be busy
_QUEUED = 2  # requests of a connection that are read ahead


class PolicyServer:
    """Serves the decisions of a policy.

    Args:
        policy: the policy, on its device.
        reader: reads its observations from requests.
        config: decisions and limits.
        metadata: sent to each client.
        api_key: key that clients have to send, or None.

    Attributes:
        counts: counters by name, see `metrics`.
    """

    def __init__(
        self,
        policy: RolloutPolicy,
        reader: ObservationReader,
        config: ServeConfig,
        metadata: Mapping[str, Any],
        api_key: str | None = None,
    ):
        self._spec, self._reader, self._config = policy.spec, reader, config
        self._vla_eval_reader = reader.with_keys(vla_eval.vla_eval_keys(reader.cameras))
        self._metadata, self._api_key = dict(metadata), api_key
        self._batcher = DecisionBatcher(policy, config.temperature, config.max_batch)
        self.counts: Counter[str] = Counter()
        self._request_seconds = 0.0
        self._server: Server | None = None

    async def run(
        self, listener: socket.socket, stop: asyncio.Event, started: Callable[[], None] | None = None
    ) -> None:
        """Serve until `stop` is set; `started` is called when clients can connect.

        Args:
            listener: a bound socket, which is closed at the end.
            stop: ends the server; open connections are closed with code 1001.
            started: called once.
        """
        quiet = logging.getLogger(f"{__name__}.websockets")
        quiet.setLevel(logging.CRITICAL)  # a client's mistakes are counted, not logged with a traceback
        decisions = asyncio.create_task(self._batcher.run())
        stopped = asyncio.create_task(stop.wait())
        try:
            async with serve(
                self._connection,
                sock=listener,
                process_request=self._admit,
                origins=[None],  # browsers send an origin: no page of the web talks to a robot's policy
                compression=None,
                max_size=int(self._config.max_message_mb * 1e6),
                max_queue=_QUEUED,
                open_timeout=_HANDSHAKE_SECONDS,
                ping_interval=_PING_SECONDS,
                ping_timeout=_PONG_SECONDS,
                close_timeout=_CLOSE_SECONDS,
                logger=quiet,
            ) as self._server:
                if started is not None:
                    started()
                await asyncio.wait([decisions, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            decisions.cancel()
            stopped.cancel()
            with suppress(asyncio.CancelledError):
                await decisions

    # ------------------------------------------------------------------------------------------------------ HTTP
    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer plain HTTP requests; None for a WebSocket that is accepted."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        if path == "/health":  # vla-eval's
            answer = connection.respond(HTTPStatus.OK, '{"status": "ok"}\n')
            del answer.headers["Content-Type"]
            answer.headers["Content-Type"] = "application/json"
            return answer
        if not self._is_authorized(request):
            self.counts["rejected"] += 1
            text = "a key is needed: Authorization: Api-Key KEY\n"
            return connection.respond(HTTPStatus.UNAUTHORIZED, text)
        if path == "/metrics":
            return connection.respond(HTTPStatus.OK, self.metrics())
        if path not in ("/", vla_eval.PATH):
            paths = f"openpi's protocol is on /, vla-eval's on {vla_eval.PATH}; there are /healthz, /health, /metrics"
            text = f"no {printable(path, 60)} here: {paths}\n"
            return connection.respond(HTTPStatus.NOT_FOUND, text)
        assert self._server is not None
        if len(self._server.connections) >= self._config.max_connections:
            self.counts["rejected"] += 1
            text = f"there are {self._config.max_connections} connections already (--max_connections)\n"
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, text)
        return None

    def _is_authorized(self, request: Request) -> bool:
        if self._api_key is None:
            return True
        sent = request.headers.get_all("Authorization")
        return any(hmac.compare_digest(value.encode(), f"Api-Key {self._api_key}".encode()) for value in sent)

    def metrics(self) -> str:
        """Counters in Prometheus' text format."""
        batches, open_now = self._batcher.counts, 0 if self._server is None else len(self._server.connections)
        values = {
            "connections": (open_now, "gauge", "open connections"),
            "connections_total": (self.counts["connections"], "counter", "accepted connections"),
            "rejected_total": (self.counts["rejected"], "counter", "connections without a key, or too many"),
            "requests_total": (self.counts["requests"], "counter", "answered requests"),
            "request_seconds_total": (self._request_seconds, "counter", "seconds from request to answer"),
            "errors_total": (self.counts["errors"], "counter", "requests that ended with an error"),
            "timeouts_total": (self.counts["timeouts"], "counter", "connections closed because their client idled"),
            "batches_total": (batches.batches, "counter", "forward passes of the policy"),
            "decisions_total": (batches.decisions, "counter", "decisions of the policy"),
            "policy_seconds_total": (batches.seconds, "counter", "seconds of the policy"),
        }
        lines = [
            f"# HELP rlvla_{name} {text}\n# TYPE rlvla_{name} {kind}\nrlvla_{name} {value:.10g}\n"
            for name, (value, kind, text) in values.items()
        ]
        return "".join(lines)

    # ------------------------------------------------------------------------------------------------ connections
    async def _connection(self, connection: ServerConnection) -> None:
        """Serve a client until it leaves, makes a mistake, or idles."""
        self.counts["connections"] += 1
        noise = EpisodeNoise(self._spec, self._config.seed, "connection", self.counts["connections"])
        try:
            request = connection.request
            if request is not None and request.path.partition("?")[0] == vla_eval.PATH:
                await self._vla_eval(connection, noise)
            else:
                await self._openpi(connection, noise)
        except (ConnectionClosed, ConnectionError):
            return
        except TimeoutError:
            self.counts["timeouts"] += 1
            await connection.close(_GOING_AWAY, f"no request for {self._config.idle_seconds:g} s")
        except MessageError as error:
            self.counts["errors"] += 1
            await self._refuse(connection, str(error))
        except Exception as error:  # of a user's policy
            self.counts["errors"] += 1
            log.exception("the policy raised an error")
            await self._refuse(connection, f"the policy raised an error: {type(error).__name__}: {error}")

    async def _refuse(self, connection: ServerConnection, text: str) -> None:
        with suppress(ConnectionClosed, ConnectionError):
            await self._send(connection, text)
        await connection.close(_ERROR, "the text frame before says why")

    async def _openpi(self, connection: ServerConnection, noise: EpisodeNoise) -> None:
        await self._send(connection, pack(self._metadata))
        previous: dict[str, float] = {}
        while True:
            message = await asyncio.wait_for(connection.recv(), self._config.idle_seconds)
            start = time.perf_counter()
            if isinstance(message, str):
                raise MessageError("a text frame; requests are binary frames with a msgpack map")
            request = unpack(message)
            observation = self._reader.read(request)
            actions = await self._batcher.decide(observation, noise.draw(request))
            timing = {"infer_ms": 1000 * (time.perf_counter() - start), **previous}
            await self._send(connection, pack({"actions": self._first(actions), "server_timing": timing}))
            self._answered(start)
            previous = {"prev_total_ms": 1000 * (time.perf_counter() - start)}

    async def _vla_eval(self, connection: ServerConnection, noise: EpisodeNoise) -> None:
        player = vla_eval.EpisodePlayer(noise, self._config.seed)
        while True:
            message = await asyncio.wait_for(connection.recv(), self._config.idle_seconds)
            start = time.perf_counter()
            request = await vla_eval.read_message(message)
            kind, payload, seq = request["type"], request["payload"], request["seq"]
            if kind == "hello":
                answer = vla_eval.hello(self._spec, self._vla_eval_reader.expected)
            elif kind == "episode_start":
                player.begin(payload)
                continue
            elif kind == "observation":
                kind = "action"
                try:
                    answer = {"actions": vla_eval.coded(await self._next_action(player, payload))}
                except MessageError as error:  # the harness ends the episode, and keeps its connection
                    self.counts["errors"] += 1
                    kind, answer = "error", {"error": str(error)}
            elif kind in ("episode_end", "error"):
                continue
            else:
                raise MessageError(f"there is no message of type {printable(str(kind), 60)!r}")
            await self._send(connection, pack(vla_eval.message(kind, answer, seq)))
            if kind == "action":
                self._answered(start)

    async def _next_action(self, player: vla_eval.EpisodePlayer, payload: Mapping[Any, Any]) -> np.ndarray:
        """The next action [D] of an episode."""
        observation = self._vla_eval_reader.read(vla_eval.flat_observation(payload))
        if player.needs_decision:
            actions = await self._batcher.decide(observation, player.noise.draw({}))
            player.add(self._first(actions))
        return player.take()

    def _first(self, actions: Any) -> Any:
        """The first `--num_actions` of a chunk."""
        return actions[: self._config.num_actions]

    def _answered(self, start: float) -> None:
        self.counts["requests"] += 1
        self._request_seconds += time.perf_counter() - start

    async def _send(self, connection: ServerConnection, message: bytes | str) -> None:
        """Send a message; a client that does not read it in time loses its connection."""
        try:
            await asyncio.wait_for(connection.send(message), self._config.send_seconds)
        except TimeoutError:
            self.counts["timeouts"] += 1
            connection.transport.abort()
            raise ConnectionError("the client does not read its answers") from None

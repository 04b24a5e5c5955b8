"""Servers that run until a signal: their socket and their event loop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from rlvla.utils.errors import ConfigError
from rlvla.utils.signals import record, taken_over
from rlvla.utils.terminal import show


class SocketServer(Protocol):
    """A server on a bound socket."""

    async def run(
        self, listener: socket.socket, stop: asyncio.Event, started: Callable[[], None] | None = None
    ) -> None:
        """Serve until `stop` is set; `started` is called when clients can connect."""
        ...


def listen(host: str, port: int, flags: str) -> socket.socket:
    """A socket on the address; ConfigError, which begins with the `flags`, if it is not available."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        text = f"{flags}: {error.strerror or error}; --port 0 takes any free port"
        raise ConfigError.of("port", "unavailable", text) from None


def serve_until_signal(server: SocketServer, listener: socket.socket, started: Callable[[], None]) -> None:
    """Run a server until it ends, or until SIGINT, SIGTERM or SIGHUP."""
    received: list[int] = []

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def on_signal(number: int, frame: FrameType | None) -> None:
            received.append(number)
            record(number)
            loop.call_soon_threadsafe(stop.set)

        with taken_over(on_signal, lambda: bool(received)):
            await server.run(listener, stop, started)

    asyncio.run(main())
    if received:
        show(f"{signal.Signals(received[0]).name}: the server has ended")

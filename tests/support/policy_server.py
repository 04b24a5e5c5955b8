"""A policy server in a thread of the test's process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from rlvla.commands.serve import check_serve, listen
from rlvla.commands.sockets import SocketServer
from rlvla.models.config import PolicyConfig
from rlvla.serving.config import ServeConfig
from rlvla.serving.observations import ObservationReader
from rlvla.serving.server import PolicyServer


class Running:
    """A running server: `url`, `port`, and the `server` itself."""

    def __init__(self, server: Any, port: int):
        self.server, self.port, self.url = server, port, f"ws://127.0.0.1:{port}"


@contextmanager
def running(server: SocketServer, listener: socket.socket) -> Iterator[Running]:
    """Run a server within the block."""
    ready, loops = threading.Event(), []

    async def main() -> None:
        stop = asyncio.Event()
        loops.extend([asyncio.get_running_loop(), stop])
        await server.run(listener, stop, ready.set)

    port = listener.getsockname()[1]
    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield Running(server, port)
    finally:
        with suppress(RuntimeError):  # it has ended by itself
            loops[0].call_soon_threadsafe(loops[1].set)
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def serving(folder: Path, **flags: Any) -> Iterator[Running]:
    """Serve a policy folder as `cli/serve_vla.py` does."""
    config = ServeConfig(port=0, **flags)
    served = check_serve(PolicyConfig(pretrain=str(folder)), config)
    policy: Any = served.checkpoint.load_policy()
    policy.eval().to(torch.bfloat16 if config.bf16 else torch.float32)
    reader = ObservationReader(policy.spec, served.cameras, served.keys)
    with running(PolicyServer(policy, reader, config, served.metadata(config), served.api_key), listen(config)) as run:
        yield run

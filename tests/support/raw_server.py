"""A TCP server for tests that sends whatever bytes it is given, well-formed or not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class RawServer:
    """Answers each connection with the same bytes once it has read a request.

    Attributes:
        blocks: called per connection; what is sent, block by block, until the other side hangs up.
        connections: number of connections so far.
        hung_up: set when the other side has ended a connection in the middle of an answer.
    """

    def __init__(self, blocks: Callable[[], Iterable[bytes]]):
        self.blocks = blocks
        self.connections = 0
        self.hung_up = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            self.connections += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._read_request(connection)
                for block in self.blocks():
                    connection.sendall(block)
            except OSError:
                self.hung_up.set()

    @staticmethod
    def _read_request(connection: socket.socket) -> None:
        """To its last byte: closing a connection that holds unread bytes resets it, and the answer may be lost."""
        with connection.makefile("rb") as request:
            length = 0
            while line := request.readline().strip():
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            request.read(length)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def raw_server(blocks: Callable[[], Iterable[bytes]]) -> Iterator[RawServer]:
    server = RawServer(blocks)
    try:
        yield server
    finally:
        server.close()


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """A complete HTTP answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body

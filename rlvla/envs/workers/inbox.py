"""Messages from a socket, read without ever waiting for the other side."""

from __future__ import annotations

import os
import socket
import struct

from rlvla.envs.workers.codec import UnreadableError

# As `multiprocessing.connection.Connection`, which the worker uses: the length, big-endian.
_HEADER = struct.Struct("!i")
_READ_BYTES = 2**16


class Inbox:
    """Collects the bytes that have arrived.

    Args:
        connection: a socket that does not block.
        limit: most bytes of a message.

    Attributes:
        at_end: whether the other side has closed the connection.
    """

    def __init__(self, connection: socket.socket, limit: int):
        self._fd, self._limit = connection.fileno(), limit
        self._bytes = bytearray()
        self.at_end = False

    @property
    def is_ready(self) -> bool:
        """Whether `take` would return at once: a message is complete, is too long, or will never be complete."""
        return self.at_end or self._has_message()

    def _has_message(self) -> bool:
        length = self._length()
        return length is not None and (not 0 <= length <= self._limit or len(self._bytes) >= _HEADER.size + length)

    def _length(self) -> int | None:
        return _HEADER.unpack_from(self._bytes)[0] if len(self._bytes) >= _HEADER.size else None

    def fill(self) -> None:
        """Read what has arrived, up to the end of a message."""
        while not self.is_ready:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the connection was reset
                data = b""
            self._bytes += data
            self.at_end = not data

    def take(self) -> bytes | None:
        """Remove and return the first message; None if there is none.

        Raises:
            UnreadableError: it announces a length beyond the limit.
        """
        if not self._has_message():
            return None
        length = self._length()
        assert length is not None
        if not 0 <= length <= self._limit:
            raise UnreadableError(f"a message of {length} bytes, where at most {self._limit} are read")
        end = _HEADER.size + length
        message = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        return message


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send a message, within the socket's time limit; OSError if the other side is gone or does not read."""
    connection.sendall(_HEADER.pack(len(message)) + message)

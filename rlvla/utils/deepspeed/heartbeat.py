"""Heartbeat between the ranks of a run, which ends when a rank is frozen, dead or unreachable.

Every rank has a connection to rank 0 and sends a message each interval from a background thread, however long its main
thread computes or waits in a collective operation. Rank 0 answers. A rank that is silent for `timeout` seconds, or
whose connection breaks without a goodbye, is lost: no collective operation can succeed any more, so the others end. A
signal that one rank received is passed on to all.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from rlvla.utils.signals import end_now, has_failed, is_leaving, pass_on, request_received

_MESSAGE = struct.Struct("!BI")  # kind, value
_ALIVE, _GOODBYE, _LOST = range(3)  # value: `request_received`, likewise, the lost rank
_TOKEN_BYTES = 16
_READY = b"\1"
_CONNECT_SECONDS = 60.0
_BEATS_PER_TIMEOUT, _LONGEST_INTERVAL = 5, 5.0  # seconds
_LOOK_SECONDS = 0.5  # between two looks at the own signal and the silence of others


@dataclass
class _Peer:
    """The connection to another rank.

    Attributes:
        rank: the other rank.
        connection: a socket that does not block.
        silent: seconds without a message while this process was running.
        received: the beginning of a message.
    """

    rank: int
    connection: socket.socket
    silent: float = 0.0
    received: bytearray = field(default_factory=bytearray)

    def send(self, kind: int, value: int = 0) -> None:
        """Send if the connection takes it: a frozen peer's does not, for long."""
        with suppress(OSError):  # noticed when reading
            self.connection.send(_MESSAGE.pack(kind, value))

    def receive(self) -> list[tuple[int, int]]:
        """The messages that have arrived.

        Raises:
            EOFError: the connection is closed or broken.
        """
        try:
            data = self.connection.recv(4096)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self.received += data
        whole = len(self.received) - len(self.received) % _MESSAGE.size
        messages = list(_MESSAGE.iter_unpack(self.received[:whole]))
        del self.received[:whole]
        return messages


class Heartbeat(threading.Thread):
    """The thread of a rank; see the module's description.

    Args:
        rank: this rank.
        peers: connections to all ranks (rank 0) or to rank 0, as `connect` returns them.
        timeout: seconds after which a silent rank is lost.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout: float):
        super().__init__(name="heartbeat", daemon=True)
        self._rank, self._timeout = rank, timeout
        self._interval = min(timeout / _BEATS_PER_TIMEOUT, _LONGEST_INTERVAL)
        self._peers = {rank: _Peer(rank, connection) for rank, connection in peers.items()}
        for connection in peers.values():
            connection.setblocking(False)
        self._was_asked = False
        self._leaving = False
        self._wake_reader, self._wake_writer = socket.socketpair()

    def leave(self) -> None:
        """End the thread, with a goodbye unless this rank has failed: then the others are to end, too."""
        self._leaving = True
        self._wake_writer.send(b"\0")
        self.join()

    def run(self) -> None:
        """Run until `leave`; if a rank is lost, end this process."""
        before, next_beat, passed_on = time.monotonic(), 0.0, 0
        while not self._leaving and self._peers:
            if time.monotonic() >= next_beat or passed_on != request_received():
                next_beat, passed_on = time.monotonic() + self._interval, request_received()
                for peer in self._peers.values():
                    peer.send(_ALIVE, passed_on)
            readable = [peer.connection for peer in self._peers.values()]
            ready = wait([*readable, self._wake_reader], min(self._interval, _LOOK_SECONDS))
            now = time.monotonic()
            # Time in which this process itself was suspended, or got no processor, counts for nobody.
            passed, before = min(now - before, 2 * _LOOK_SECONDS), now
            for peer in list(self._peers.values()):
                peer.silent += passed
                if peer.connection in ready:
                    self._read(peer)
                if peer.silent > self._timeout and peer.rank in self._peers:
                    self._lose(peer.rank, f"no sign of life for {self._timeout:g} s (--rank_timeout)")
        for peer in self._peers.values():
            if not has_failed():
                peer.send(_GOODBYE, request_received())
            with suppress(OSError):  # the other one was faster
                peer.connection.shutdown(socket.SHUT_RDWR)  # also if a child process holds a copy
            peer.connection.close()

    def _read(self, peer: _Peer) -> None:
        try:
            messages = peer.receive()
        except EOFError:
            self._lose(peer.rank, "its connection broke")
            return
        for kind, value in messages:
            peer.silent = 0.0
            if kind == _LOST:
                end_now("", prints=False)  # rank 0 prints the reason
            if kind == _GOODBYE:
                self._peers.pop(peer.rank, None)
            if value and not self._was_asked:
                self._was_asked = True
                pass_on(value)

    def _lose(self, rank: int, why: str) -> None:
        if has_failed():
            del self._peers[rank]
            return  # this rank is about to end with its own message
        for peer in self._peers.values():  # the lost one as well, which may only have been slow
            peer.send(_LOST, rank)
        del self._peers[rank]
        # Rank 0 reports it, or rank 1 if rank 0 itself is lost.
        prints = (self._rank == 0 or (rank == 0 and self._rank == 1)) and not is_leaving()
        end_now(f"rank {rank} is gone: {why}", prints=prints)


def listen(address: str) -> tuple[socket.socket, bytes]:
    """Rank 0: a listening socket, and the token with which other ranks introduce themselves."""
    try:
        server = socket.create_server((address, 0))
    except OSError:  # a name that other machines know this one by
        server = socket.create_server(("", 0))
    return server, secrets.token_bytes(_TOKEN_BYTES)


def accept(server: socket.socket, token: bytes, world_size: int) -> dict[int, socket.socket]:
    """Rank 0: the connections of the other ranks, by rank; strangers are turned away.

    Raises:
        OSError: some did not connect in time.
    """
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _CONNECT_SECONDS
    with server:
        while len(connections) < world_size - 1:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            connection, _ = server.accept()
            connection.settimeout(5.0)
            try:
                greeting = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            except OSError:
                greeting = b""
            rank = int.from_bytes(greeting[_TOKEN_BYTES:], "big")
            if secrets.compare_digest(greeting[:_TOKEN_BYTES], token) and 0 < rank < world_size:
                connections[rank] = connection
            else:
                connection.close()
    for connection in connections.values():
        connection.sendall(_READY)
    return connections


def connect(address: str, port: int, token: bytes, rank: int) -> dict[int, socket.socket]:
    """Another rank: its connection to rank 0.

    Raises:
        OSError: rank 0 cannot be reached.
    """
    connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
    connection.sendall(token + rank.to_bytes(4, "big"))
    if connection.recv(len(_READY)) != _READY:  # all ranks are connected: signs of life may be expected
        raise ConnectionError("rank 0 did not answer")
    return {0: connection}

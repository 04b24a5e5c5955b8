"""Interfaces between a pool and its workers: starting, messaging and ending them.

Implemented by `rlvla.envs.workers.processes` (this machine) and `rlvla.envs.workers.ray_backend` (Ray cluster).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rlvla.envs.workers.messages import Hello, SlotAnswer, SlotCommand

UNLIMITED = 10**6  # more environments than a slot ever caches


class WorkerGoneError(Exception):
    """The process of a worker has ended or can no longer be reached."""


@dataclass(frozen=True)
class WorkerOptions:
    """Start options common to all workers of a pool.

    Attributes:
        custom_modules: modules to import at start.
        environment: additional environment variables.
        num_slots: number of slots, i.e. concurrent episodes.
        max_kept: limit of `Suite.kept`.
    """

    custom_modules: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    num_slots: int = 1
    max_kept: int = UNLIMITED


class Channel(Protocol):
    """Connection to a worker: the worker sends a `Hello`, then commands and answers alternate within each slot.

    Commands are executed in the order they were sent; commands of several slots may be executed together.
    """

    @property
    def pid(self) -> int:
        """Process id on the worker's machine."""
        ...

    @property
    def place(self) -> str:
        """Interpreter or host of the worker, for error messages."""
        ...

    def send(self, commands: Sequence[SlotCommand]) -> None:
        """Send commands for one or more slots without waiting.

        Raises:
            WorkerGoneError: the worker is known to be gone.
            OSError: not enough shared memory; none of the commands was sent.
        """
        ...

    def receive(self) -> Hello | list[SlotAnswer]:
        """Read the message announced by `Backend.wait`: a `Hello`, or answers of one or more slots.

        Raises:
            WorkerGoneError: the worker has ended.
            DecodeError: the message is invalid.
        """
        ...

    def kill(self) -> None:
        """Kill the worker immediately."""
        ...

    def reap(self) -> str:
        """Close the channel, ensure that the worker has ended, and return a description of its end."""
        ...

    def rss_bytes(self) -> int:
        """Resident memory of the worker in bytes; 0 if unknown."""
        ...


AnyChannel = TypeVar("AnyChannel", bound=Channel)


class Backend(Protocol[AnyChannel]):
    """Starts workers and waits for their messages."""

    def start(self, options: WorkerOptions) -> AnyChannel:
        """Start a worker without waiting for it.

        Raises:
            ConfigError: the backend cannot start workers.
            OSError: out of memory or processes.
        """
        ...

    def wait(self, channels: Sequence[AnyChannel], timeout: float | None) -> Sequence[AnyChannel]:
        """Channels ready to `receive`; waits up to `timeout` seconds (None: forever) for the first.

        Incomplete messages do not delay the return beyond the timeout.
        """
        ...

    def close(self, idle: Sequence[AnyChannel], busy: Sequence[AnyChannel]) -> None:
        """End workers; idle ones may close their environments first."""
        ...

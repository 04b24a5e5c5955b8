"""What lies between a pool and its workers: how they are started, reached and ended.

`rlvla.envs.processes` has them on this machine, `rlvla.envs.ray_backend` on a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rlvla.envs.messages import Command


class WorkerGoneError(Exception):
    """The process of a worker has ended, or cannot be reached any more."""


@dataclass(frozen=True)
class WorkerOptions:
    """How every worker of a pool is started.

    Attributes:
        custom_modules: what it imports first.
        environment: variables beyond those of this process.
    """

    custom_modules: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Channel(Protocol):
    """One worker and the way to it: it says hello, then commands and answers alternate."""

    @property
    def pid(self) -> int:
        """The process id on the machine where it runs."""
        ...

    @property
    def place(self) -> str:
        """Where it runs, for messages about it."""
        ...

    def send(self, command: Command) -> None:
        """Hand over a command without waiting.

        Raises:
            WorkerGoneError: the worker is known to be gone.
            OSError: no room for the arrays of the command; the worker knows nothing of it.
        """
        ...

    def receive(self) -> Any:
        """The message that `Backend.wait` has announced: a `Hello`, an answer or a `Failure`.

        Raises:
            WorkerGoneError: it will not come any more.
            Exception: anything else that is wrong with it.
        """
        ...

    def kill(self) -> None:
        """End the worker at once, whatever it is doing."""
        ...

    def bury(self) -> str:
        """Give up the channel and make sure that the worker is gone; returns how it ended."""
        ...

    def rss_bytes(self) -> int:
        """Resident memory of the worker; 0 where it is not known."""
        ...


AnyChannel = TypeVar("AnyChannel", bound=Channel)


class Backend(Protocol[AnyChannel]):
    """Where workers run."""

    def start(self, options: WorkerOptions) -> AnyChannel:
        """Start a worker without waiting for it.

        Raises:
            ConfigError: this backend cannot start any.
            OSError: no memory or no process left now.
        """
        ...

    def wait(self, channels: Sequence[AnyChannel], timeout: float | None) -> Sequence[AnyChannel]:
        """Those that have something to `receive`, waiting up to `timeout` seconds (None: for ever) for the first."""
        ...

    def close(self, idle: Sequence[AnyChannel], busy: Sequence[AnyChannel]) -> None:
        """End workers: idle ones may close their environment first."""
        ...

"""Watches over a pool: nothing that a worker does or fails to do can stop the caller.

A worker that takes longer than its phase may is killed. Dead workers are started anew without anybody waiting for them,
and a worker whose memory has grown too much is replaced between two commands.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rlvla.envs.messages import Command, EnvSpec, Hello
from rlvla.envs.pool import EnvWorkerError, Result, WorkerState
from rlvla.utils.errors import ConfigError

log = logging.getLogger(__name__)

# How often the clock is looked at while nothing arrives, and how often memory is looked at, in seconds.
_TICK, _MEMORY_INTERVAL = 0.2, 2.0
# Starts of one worker in a row that may fail before there is no point in another.
_FAILED_STARTS = 3


@dataclass(frozen=True)
class WatchdogLimits:
    """Seconds that each phase of a worker may take, and the memory it may hold.

    Attributes:
        start: from the start of the process to its first message.
        create: building an environment.
        reset: one reset.
        step: one action chunk.
        expert: one episode of a scripted expert.
        max_rss_gb: resident memory (1e9 bytes) past which a worker is replaced before its next episode; None: no limit.
    """

    start: float = 120.0
    create: float = 300.0
    reset: float = 120.0
    step: float = 120.0
    expert: float = 600.0
    max_rss_gb: float | None = None

    def of(self, phase: str) -> float:
        """The limit of a phase as `EnvPool.phase` names it."""
        return {"start": self.start, "make": self.create, "reset": self.reset, "step_chunk": self.step}.get(
            phase, self.expert
        )


class Pool(Protocol):
    """What the watchdog asks of a pool, see `rlvla.envs.pool.EnvPool`."""

    @property
    def num_workers(self) -> int: ...  # noqa: D102

    def state(self, worker_id: int) -> WorkerState: ...  # noqa: D102

    def phase(self, worker_id: int) -> str: ...  # noqa: D102

    def holds(self, worker_id: int) -> EnvSpec | None: ...  # noqa: D102

    def busy_seconds(self, worker_id: int) -> float: ...  # noqa: D102

    def rss_bytes(self, worker_id: int) -> int: ...  # noqa: D102

    def failure(self, worker_id: int, message: str) -> EnvWorkerError: ...  # noqa: D102

    def submit(self, worker_id: int, command: Command) -> None: ...  # noqa: D102

    def wait(self, timeout: float | None = None) -> list[tuple[int, Result]]: ...  # noqa: D102

    def restart(self, worker_id: int, *, wait: bool = True) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class WatchedPool:
    """A pool whose workers are watched and replaced.

    Args:
        pool: the workers; closed with this.
        limits: how long each phase may take.

    Attributes:
        restarts: workers replaced so far because they failed or hung.
        recycled: workers replaced so far because of their memory.
    """

    def __init__(self, pool: Pool, limits: WatchdogLimits | None = None):
        self._pool = pool
        self._limits = limits or WatchdogLimits()
        self.restarts = self.recycled = 0
        self._working: set[int] = set()  # workers that owe the caller an answer
        self._failed: deque[tuple[int, Result]] = deque()
        self._failed_starts = [0] * pool.num_workers
        self._memory_seen = [0.0] * pool.num_workers

    def __enter__(self) -> WatchedPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_workers(self) -> int:
        """How many workers there are, whatever their state."""
        return self._pool.num_workers

    def holds(self, worker_id: int) -> EnvSpec | None:
        """The environment that worker is known to have built."""
        return self._pool.holds(worker_id)

    def idle(self) -> list[int]:
        """Workers that can take a command now. Dead ones are started anew on the way."""
        for worker in range(self._pool.num_workers):
            if self._pool.state(worker) is WorkerState.DEAD:
                self.replace(worker)
        return [
            worker
            for worker in range(self._pool.num_workers)
            if self._pool.state(worker) is WorkerState.IDLE and worker not in self._working
        ]

    def between_episodes(self, worker_id: int) -> bool:
        """Replace an idle worker that holds too much memory; False if it has been and is not ready now."""
        limit, now = self._limits.max_rss_gb, time.monotonic()
        if limit is None or now - self._memory_seen[worker_id] < _MEMORY_INTERVAL:
            return True
        self._memory_seen[worker_id] = now
        held = self._pool.rss_bytes(worker_id) / 1e9
        if held <= limit:
            return True
        log.warning("environment worker %d holds %.2f GB, more than %.2f: it is replaced", worker_id, held, limit)
        self.recycled += 1
        self._pool.restart(worker_id, wait=False)
        return False

    def submit(self, worker_id: int, command: Command) -> None:
        """Give a command to an idle worker; whatever goes wrong is reported by `wait`."""
        self._working.add(worker_id)
        try:
            self._pool.submit(worker_id, command)
        except OSError as error:  # no shared memory left
            self._failed.append((worker_id, self._pool.failure(worker_id, f"the command could not be sent: {error}")))

    def wait(self, timeout: float | None = None) -> list[tuple[int, Result]]:
        """Collect answers and failures of commands; returns after `timeout` seconds at the latest, perhaps earlier.

        Returns:
            (worker id, result) pairs as from `EnvPool.wait`; never a `Hello`. May be empty.

        Raises:
            EnvWorkerError: a worker could not be started several times in a row.
        """
        tick = _TICK if timeout is None else min(_TICK, timeout)
        answers = self._pool.wait(0.0 if self._failed else tick)
        if not (answers or self._failed) and not self._busy():  # a pool without busy workers does not wait
            time.sleep(tick)
        results: list[tuple[int, Result]] = list(self._failed)
        self._failed.clear()
        for worker, result in answers:
            if worker in self._working:
                results.append((worker, result))
            elif isinstance(result, Hello):
                self._failed_starts[worker] = 0
            elif isinstance(result, EnvWorkerError):
                self._start_failed(worker, result)
        results += self._stop_late_ones()
        self._working -= {worker for worker, _ in results}
        return results

    def settle(self) -> None:
        """Wait until no worker owes an answer; what they answer is thrown away."""
        while self._working:
            self.wait()

    def abandon(self) -> None:
        """Forget what is being done: workers that owe an answer are replaced."""
        for worker in sorted(self._working):
            self.replace(worker)
        self._working.clear()
        self._failed.clear()

    def close(self) -> None:
        """End all workers."""
        self._pool.close()

    def _busy(self) -> bool:
        return any(self._pool.state(worker) is WorkerState.BUSY for worker in range(self._pool.num_workers))

    def _stop_late_ones(self) -> list[tuple[int, Result]]:
        late: list[tuple[int, Result]] = []
        for worker in range(self._pool.num_workers):
            if self._pool.state(worker) is not WorkerState.BUSY:
                continue
            phase = self._pool.phase(worker)
            limit = self._limits.of(phase)
            if self._pool.busy_seconds(worker) <= limit:
                continue
            error = self._pool.failure(worker, f"no answer within {limit:g} s: the process is replaced")
            if worker in self._working:
                late.append((worker, error))
                self.replace(worker)
            else:
                self._start_failed(worker, error)
        return late

    def _start_failed(self, worker: int, error: EnvWorkerError) -> None:
        self._failed_starts[worker] += 1
        if self._failed_starts[worker] >= _FAILED_STARTS:
            raise error
        self.replace(worker)

    def replace(self, worker: int) -> None:
        """Kill a worker and start another in its place, without waiting for it."""
        self.restarts += 1
        try:
            self._pool.restart(worker, wait=False)
        except OSError as error:  # no shared memory or no process left: tried again when a worker is looked for
            log.warning("environment worker %d cannot be started anew now: %s", worker, error)


def run_everywhere(pool: WatchedPool, command: Command) -> Sequence[Result]:
    """Let every worker execute a command once and return the answers.

    Raises:
        ConfigError, EnvWorkerError: the first that a worker reported.
    """
    answers: list[Result] = []
    for worker in range(pool.num_workers):
        pool.submit(worker, command)
    while len(answers) < pool.num_workers:
        for _, result in pool.wait():
            if isinstance(result, EnvWorkerError | ConfigError):
                raise result
            answers.append(result)
    return answers

"""Supervision of a pool, so that a failing or hanging worker never blocks the caller.

Workers that exceed the time limit of their phase are killed. Dead workers are restarted in the background, and workers
that use too much memory are replaced between episodes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from rlvla.envs.workers.answer_checks import BadAnswerError
from rlvla.envs.workers.messages import Command, EnvSpec, Hello, SlotCommand, WithinEpisode
from rlvla.envs.workers.pool import EnvPool, EnvWorkerError, Result, WorkerState
from rlvla.utils.errors import ConfigError

log = logging.getLogger(__name__)

# Intervals in seconds at which time limits and memory are checked.
_TICK, _MEMORY_INTERVAL = 0.2, 2.0
# Failed starts in a row of a worker, or losses before the first rollout, after which the error is raised.
_ATTEMPTS = 3


@dataclass(frozen=True)
class WatchdogLimits:
    """Time limits in seconds for each phase of a worker, and its memory limit.

    Attributes:
        start: process start until its first message.
        create: building an environment.
        reset: one reset.
        step: one action chunk.
        expert: a whole episode of a scripted expert or of given actions.
        max_rss_gb: resident memory (1e9 bytes) above which a worker is replaced between episodes; None: no limit.
    """

    start: float = 120.0
    create: float = 300.0
    reset: float = 120.0
    step: float = 120.0
    expert: float = 600.0
    max_rss_gb: float | None = None

    def of(self, phase: str) -> float:
        """The limit of a phase as `EnvPool.phase` names it."""
        limits = {"start": self.start, "make": self.create, "reset": self.reset}
        limits |= {"step_chunk": self.step, "step_expert": self.step}
        return limits.get(phase, self.expert)


class WatchedPool:
    """A pool whose workers are supervised and replaced if necessary.

    Args:
        pool: the pool to supervise; closed together with this one.
        limits: time and memory limits.

    Attributes:
        restarts: workers replaced so far because they failed or hung.
        recycled: workers replaced so far because of their memory.
    """

    def __init__(self, pool: EnvPool, limits: WatchdogLimits | None = None):
        self._pool = pool
        self._limits = limits or WatchdogLimits()
        self.restarts = self.recycled = 0
        self._working: set[int] = set()  # slots with an answer pending for the caller
        self._failed: deque[tuple[int, Result]] = deque()
        self._lost: dict[int, EnvWorkerError] = {}  # slots whose worker was replaced during their episode
        self._failed_starts = [0] * pool.num_workers
        self._memory_checked = [0.0] * pool.num_workers  # time of the last check
        self._oversized: set[int] = set()  # workers to replace once none of their slots plays an episode

    def __enter__(self) -> WatchedPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def num_slots(self) -> int:
        """Number of slots in any state."""
        return self._pool.num_slots

    @property
    def num_workers(self) -> int:
        """Number of workers in any state."""
        return self._pool.num_workers

    def worker_of(self, slot: int) -> int:
        """Index of the worker that a slot belongs to."""
        return self._pool.worker_of(slot)

    def holds(self, slot: int) -> EnvSpec | None:
        """The current environment of a slot."""
        return self._pool.holds(slot)

    def keeps(self, slot: int) -> list[EnvSpec]:
        """Current and cached environments of a slot, most recent first."""
        return self._pool.keeps(slot)

    def idle(self) -> list[int]:
        """Slots that can accept a command. Dead workers are restarted."""
        for worker in range(self._pool.num_workers):
            slot = self._pool.slots_of(worker)[0]
            if self._pool.state(slot) is WorkerState.DEAD:
                self.replace(slot)
        return [
            slot
            for slot in range(self._pool.num_slots)
            if self._pool.state(slot) is WorkerState.IDLE and slot not in self._working
        ]

    def between_episodes(self, slot: int, playing: Container[int] = ()) -> bool:
        """Whether an idle slot may start an episode.

        A worker that uses too much memory starts none, and is replaced once none of its slots plays an episode.

        Args:
            slot: the slot.
            playing: slots with a running episode.
        """
        if self._limits.max_rss_gb is None:
            return True
        if self._pool.state(slot) is not WorkerState.IDLE:  # its worker was just replaced
            return False
        worker = self._pool.worker_of(slot)
        if worker not in self._oversized and not self._exceeds_memory(slot, worker, self._limits.max_rss_gb):
            return True
        self._oversized.add(worker)
        if not any(other in playing for other in self._pool.slots_of(worker)):
            self._oversized.discard(worker)
            self.recycled += 1
            self._pool.restart(slot, wait=False)
        return False

    def _exceeds_memory(self, slot: int, worker: int, limit: float) -> bool:
        now = time.monotonic()
        if now - self._memory_checked[worker] < _MEMORY_INTERVAL:
            return False
        self._memory_checked[worker] = now
        used = self._pool.rss_bytes(slot) / 1e9
        if used > limit:
            log.warning("environment worker %d uses %.2f GB, more than %.2f: replacing it", worker, used, limit)
        return used > limit

    def submit(self, slot: int, command: Command) -> None:
        """Send a command to an idle slot; failures are reported by `wait`."""
        self.submit_all([(slot, command)])

    def submit_all(self, commands: Sequence[SlotCommand]) -> None:
        """Send commands to several idle slots, one message per worker; see `submit`.

        The command fails if the slot lost its episode because its worker was replaced.
        """
        possible = []
        for slot, command in commands:
            self._working.add(slot)
            lost = self._lost.pop(slot, None)
            begins = not isinstance(command, WithinEpisode)
            if self._pool.state(slot) is WorkerState.IDLE and (lost is None or begins):
                possible.append((slot, command))
            else:
                error = lost or self._pool.failure(slot, "the worker has ended", collateral=True)
                self._failed.append((slot, error))
        self._pool.submit_all(possible)

    def wait(self, timeout: float | None = None) -> list[tuple[int, Result]]:
        """Return answers and failures of commands, after at most `timeout` seconds.

        Returns:
            (slot, result) pairs as from `EnvPool.wait`; never a `Hello`. May be empty.

        Raises:
            EnvWorkerError: a worker failed to start several times in a row.
        """
        tick = _TICK if timeout is None else min(_TICK, timeout)
        answers = self._pool.wait(0.0 if self._failed else tick)
        if not (answers or self._failed):
            slots = range(self._pool.num_slots)
            if not any(self._pool.state(slot) is WorkerState.BUSY for slot in slots):  # the pool returned at once
                time.sleep(tick)
        results: list[tuple[int, Result]] = list(self._failed)
        self._failed.clear()
        self._working -= {slot for slot, _ in results}  # later results for them belong to a start
        for slot, result in answers:
            if slot in self._working:
                results.append((slot, result))
            elif isinstance(result, Hello):
                self._failed_starts[self._pool.worker_of(slot)] = 0
            elif isinstance(result, EnvWorkerError):
                self._start_failed(slot, result)
        self._working -= {slot for slot, _ in results}
        return results + self._stop_overdue()

    def call(self, slot: int, command: Command) -> Any:
        """Execute a command in a slot of a pool that nobody else uses, once it is idle, and return its answer.

        Raises:
            ConfigError, EnvWorkerError: as returned by `wait`.
        """
        while slot not in self.idle():  # being started, or restarted after a failure
            self.wait()
        self.submit(slot, command)
        while not (answers := self.wait()):
            pass
        result = answers[0][1]
        if isinstance(result, Exception):
            raise result
        return result

    def drain(self) -> None:
        """Wait until no answer is pending; discards the answers."""
        while self._working:
            self.wait()

    def abandon(self) -> None:
        """Abort all commands by replacing the workers with pending answers."""
        for worker in sorted({self._pool.worker_of(slot) for slot in self._working}):
            self.replace(self._pool.slots_of(worker)[0])
        self._working.clear()
        self._failed.clear()

    def close(self) -> None:
        """End all workers."""
        self._pool.close()

    def _stop_overdue(self) -> list[tuple[int, Result]]:
        late: list[tuple[int, Result]] = []
        for slot in range(self._pool.num_slots):
            if self._pool.state(slot) is not WorkerState.BUSY:
                continue
            phase = self._pool.phase(slot)
            limit = self._limits.of(phase)
            if self._pool.busy_seconds(slot) <= limit:
                continue
            message = f"no answer within {limit:g} s: replacing the process"
            if slot not in self._working:
                self._start_failed(slot, self._pool.failure(slot, message, kind="late"))
                continue
            batch = self._pool.executing(self._pool.worker_of(slot))  # any command of the call may be the cause
            late += [(member, self._pool.failure(member, message, kind="late")) for member in batch]
            self._working.difference_update(batch)
            self.replace(slot)
        return late

    def _start_failed(self, slot: int, error: EnvWorkerError) -> None:
        worker = self._pool.worker_of(slot)
        self._failed_starts[worker] += 1
        if self._failed_starts[worker] >= _ATTEMPTS:
            raise error
        log.warning("a worker did not start and is replaced: %s", error)
        self.replace(slot)

    def reject(self, slot: int, error: BadAnswerError) -> EnvWorkerError:
        """Replace the worker of a slot after an invalid answer; returns the failure report."""
        message = f"violated the environment contract: {error}"
        failure = self._pool.failure(slot, message, kind="bad_answer", error_type=type(error).__name__)
        self.replace(slot)
        return failure

    def replace(self, slot: int) -> None:
        """Kill the worker of a slot and start a new one in the background.

        Other slots of the worker lose their episodes: slots with a pending answer fail now, the others at their next
        action chunk. These failures are collateral.
        """
        self.restarts += 1
        worker = self._pool.worker_of(slot)
        self._oversized.discard(worker)
        answered = {failed for failed, _ in self._failed}
        for other in self._pool.slots_of(worker):
            if other in answered:
                continue
            message = "the worker was replaced after a failure in one of its slots"
            error = self._pool.failure(other, message, collateral=True)
            if other in self._working:
                self._failed.append((other, error))
            else:
                self._lost[other] = error
        try:
            self._pool.restart(slot, wait=False)
        except OSError as error:  # out of shared memory or processes: `idle` tries again
            log.warning("environment worker %d: restart failed, will retry: %s", worker, error)


def run_everywhere(
    pool: WatchedPool, command_of: Callable[[int], Command], check: Callable[[Result], None] | None = None
) -> list[Any]:
    """Execute a command in each slot before the first rollout; lost workers are replaced and their commands repeated.

    Args:
        pool: the workers, which may still be starting.
        command_of: slot -> its command.
        check: raises BadAnswerError for an invalid answer.

    Returns:
        The answers by slot.

    Raises:
        ConfigError: the first one reported by a worker.
        EnvWorkerError: an environment raised an exception, or a worker was lost several times.
    """
    answers: dict[int, Result] = {}
    losses: Counter[int] = Counter()
    while len(answers) < pool.num_slots:
        pool.submit_all([(slot, command_of(slot)) for slot in pool.idle() if slot not in answers])
        for slot, result in pool.wait():
            if isinstance(result, ConfigError):
                raise result
            if check is not None and not isinstance(result, EnvWorkerError):
                try:
                    check(result)
                except BadAnswerError as error:
                    result = pool.reject(slot, error)
            if not isinstance(result, EnvWorkerError):
                answers[slot] = result
                continue
            losses[slot] += not result.collateral
            if result.kind == "exception" or losses[slot] >= _ATTEMPTS:
                raise result
            log.warning("repeating a command of a lost worker: %s", result)
    return [answers[slot] for slot in range(pool.num_slots)]

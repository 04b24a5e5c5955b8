"""A non-blocking pool of environment workers with one or more slots each."""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlvla.envs.registry import get_suite, located, registered_suites
from rlvla.envs.workers.backend import UNLIMITED, Backend, Channel, WorkerGoneError, WorkerOptions
from rlvla.envs.workers.codec import DecodeError
from rlvla.envs.workers.messages import (
    PROTOCOL_VERSION,
    Answer,
    Command,
    EnvSpec,
    Failure,
    Hello,
    Make,
    PlayActions,
    PrivilegedState,
    Reset,
    RunExpert,
    SlotCommand,
    StepChunk,
    StepExpert,
    WithinEpisode,
)
from rlvla.envs.workers.processes import ProcessBackend
from rlvla.utils.errors import ConfigError, RunEnded
from rlvla.version import __version__


class WorkerState(enum.Enum):
    """State of a slot: IDLE accepts a command, BUSY has a pending answer, DEAD needs `EnvPool.restart`."""

    IDLE = "idle"
    BUSY = "busy"
    DEAD = "dead"


# Causes of a failure: an exception, the end of the process, a time limit, an answer that violates the contract, a
# command that could not be sent, and (lost) a failure of another slot.
FAULT_KINDS = ("exception", "ended", "late", "bad_answer", "unsent", "lost")


class EnvWorkerError(RunEnded):
    """A worker raised an exception or its process ended; nobody handles it only after several attempts.

    Attributes:
        worker_id: index of the worker.
        slot: slot of the pool; the argument is None if each worker has one slot.
        phase: phase of the failure: start, import, or one of `PHASES`.
        suite, task_id, init_state_id, seed: the environment and the episode; None if there is none.
        error_type: class name of the exception; None if the process ended.
        worker_traceback: the worker's traceback; empty if the process ended.
        collateral: whether another slot of the worker caused the failure.
        kind: one of `FAULT_KINDS`.
    """

    def __init__(
        self,
        message: str,
        *,
        worker_id: int,
        phase: str,
        slot: int | None = None,
        spec: EnvSpec | None = None,
        init_state_id: int | None = None,
        seed: int | None = None,
        error_type: str | None = None,
        worker_traceback: str = "",
        collateral: bool = False,
        kind: str = "ended",
    ):
        self.worker_id = worker_id
        self.slot = worker_id if slot is None else slot
        self.phase = phase
        self.suite = spec.suite if spec else None
        self.task_id = spec.task_id if spec else None
        self.init_state_id = init_state_id
        self.seed = seed
        self.error_type = error_type
        self.worker_traceback = worker_traceback
        self.collateral = collateral
        self.kind = "lost" if collateral else kind
        where = f"{worker_name(worker_id, slot)}, phase {phase}"
        if spec is not None:
            where += f", {spec.suite} task {spec.task_id}"
        if seed is not None:
            where += f", initial state {init_state_id}, seed {seed}"
        super().__init__(f"{where}: {message}" + (f"\n{worker_traceback}" if worker_traceback else ""))


def worker_name(worker_id: int, slot: int | None) -> str:
    """Name of a worker's slot in messages; `slot` is None if each worker has one slot."""
    return f"environment worker {worker_id}" + ("" if slot is None else f" (slot {slot})")


# Result of a command, or of a start in the background.
Result = Answer | Hello | EnvWorkerError | ConfigError
# Command -> phase of the slot that executes it.
PHASES: dict[type, str] = {
    Make: "make",
    Reset: "reset",
    StepChunk: "step_chunk",
    StepExpert: "step_expert",
    RunExpert: "run_expert",
    PlayActions: "play_actions",
    PrivilegedState: "privileged_state",
}


class _Slot:
    """The pool's view of a slot."""

    def __init__(self, max_kept: int = UNLIMITED) -> None:
        self._max_kept = max_kept
        self.command: Command | None = None
        # Environment and episode, for error messages.
        self.spec: EnvSpec | None = None
        self.built: EnvSpec | None = None  # current environment
        self.kept: list[EnvSpec] = []  # cached environments, the most recent one last
        self.init_state_id: int | None = None
        self.seed: int | None = None
        self.sent = 0.0  # time at which the command was sent to the worker
        self.lost = False  # its episode was lost by a failure of another slot that shares its environment

    @property
    def phase(self) -> str:
        return "start" if self.command is None else PHASES[type(self.command)]

    def set_built(self, spec: EnvSpec | None) -> None:
        """Set the current environment and update the cached ones as the worker does."""
        if spec is not None and spec != self.built:
            suite = registered_suites().get(spec.suite)
            number = 0 if suite is None else min(suite.kept, self._max_kept)
            others = [*self.kept, *([] if self.built is None else [self.built])]
            others = [other for other in others if other != spec]
            self.kept = others[max(0, len(others) - number) :]
        self.built = spec

    def note(self, command: Command) -> None:
        """Record the command, its environment and its episode."""
        self.command = command
        if not isinstance(command, WithinEpisode):
            self.spec = command.env
            self.init_state_id = getattr(command, "init_state_id", None)
            self.seed = getattr(command, "seed", None)

    def joins(self, other: _Slot) -> bool:
        """Whether a single call of a batched environment may execute the commands of both."""
        kind = type(self.command)
        if kind not in (Reset, StepChunk) or kind is not type(other.command) or self.spec != other.spec:
            return False
        assert self.spec is not None
        try:
            return get_suite(self.spec.suite).offers_batch(self.spec.options)
        except ConfigError:  # a suite that is registered in the workers only
            return False


class WorkerHandle:
    """The pool's view of a worker: its process, and its slots, numbered from `first` in the pool."""

    def __init__(self, worker_id: int, first: int, options: WorkerOptions, channel: Channel):
        self.worker_id, self.first = worker_id, first
        self.channel = channel
        self.state = WorkerState.BUSY  # until its `Hello` arrives
        self.end = ""  # description of the end of its process
        self.slots = [_Slot(options.max_kept) for _ in range(options.num_slots)]
        self.pending: list[int] = []  # slots with a pending answer, in the order of their commands
        self.since = time.monotonic()  # start time of the first pending command

    def shown(self, slot: int) -> int | None:
        """The slot's number in the pool, for messages; None if each worker has one slot."""
        return self.first + slot if len(self.slots) > 1 or self.first != self.worker_id else None

    def executing(self) -> list[int]:
        """Slots whose commands are being executed: the oldest, and all that may share its call."""
        if not self.pending:
            return []
        first = self.slots[self.pending[0]]
        others = [slot for slot in self.pending[1:] if self.slots[slot].sent <= self.since]
        return [self.pending[0], *(slot for slot in others if self.slots[slot].joins(first))]

    def error(
        self,
        slot: int,
        message: str,
        failure: Failure | None = None,
        collateral: bool = False,
        kind: str = "ended",
        error_type: str | None = None,
    ) -> EnvWorkerError:
        """Create the failure report of a slot; `failure` is the worker's description, if any."""
        entry = self.slots[slot]
        return EnvWorkerError(
            message,
            worker_id=self.worker_id,
            slot=self.shown(slot),
            phase=failure.phase if failure else entry.phase,
            spec=entry.spec,
            init_state_id=entry.init_state_id,
            seed=entry.seed,
            error_type=failure.error_type if failure else error_type,
            worker_traceback=failure.traceback if failure else "",
            collateral=collateral,
            kind="exception" if failure else kind,
        )

    def send(self, commands: Sequence[SlotCommand]) -> None:
        """Send commands; raises as `Channel.send`. Their answers are pending even after a `WorkerGoneError`."""
        now = time.monotonic()
        if not self.pending:
            self.since = now
        for slot, command in commands:
            self.slots[slot].note(command)
            self.slots[slot].sent = now
            self.pending.append(slot)
        try:
            self.channel.send(commands)
        except OSError:
            del self.pending[-len(commands) :]
            raise

    def take(self, slot: int, answer: Answer | Failure) -> Result:
        """Convert an answer to a result and update the slot."""
        self.pending.remove(slot)
        entry = self.slots[slot]
        lost, entry.lost = entry.lost, False
        if not isinstance(answer, Failure):
            entry.set_built(entry.spec)
            return answer
        entry.built = None  # the worker discards the environment
        for closed in answer.closed:
            self.slots[closed].built, self.slots[closed].lost = None, True
        if answer.problems:
            return ConfigError(answer.problems)
        collateral = lost and isinstance(entry.command, WithinEpisode)
        return self.error(slot, f"{answer.error_type}: {answer.message}", answer, collateral)


class EnvPool:
    """Slots, each with one environment at a time, on workers with one or more slots each.

    Commands are submitted without blocking and answers are collected with `wait`, so that other work, such as a forward
    pass of the policy, overlaps with simulation:

        with EnvPool(4) as pool:
            pool.submit(0, Reset(EnvSpec("toy_reach", 0), init_state_id=3, seed=0))
            for slot, result in pool.wait():
                ...

    Use the pool from one thread at a time. Workers end with this process, however it ends (`guardian`).

    Args:
        num_slots: number of slots, i.e. concurrent episodes.
        envs_per_worker: slots of each worker; worker w has the slots from w * envs_per_worker on.
        backend: where workers run; by default processes on this machine.
        python: interpreter of the processes, by default that of this process; cannot be combined with `backend`.
        custom_modules: modules (`.py` files or dotted names) that workers import at start, to register suites.
        environment: additional environment variables of the workers.
        max_kept: limit of the environments that a slot caches (`Suite.kept`).
        start_timeout: seconds to wait for the workers to start.
        wait: block until the workers are ready; otherwise slots are busy until `wait` returns their worker's `Hello`.

    Raises:
        EnvWorkerError: a worker did not start or runs another version of rlvla.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        envs_per_worker: int = 1,
        backend: Backend[Any] | None = None,
        python: str | None = None,
        custom_modules: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        max_kept: int = UNLIMITED,
        start_timeout: float = 120.0,
        wait: bool = True,
    ):
        if num_slots < 1 or envs_per_worker < 1:
            raise ConfigError(
                f"an environment pool needs at least one slot and one per worker, not {num_slots} and {envs_per_worker}"
            )
        if backend is not None and python is not None:
            raise ConfigError(f"python={python!r} is for worker processes of this machine, not for another backend")
        self._num_slots, self._envs_per_worker = num_slots, envs_per_worker
        self._backend: Backend[Any] = backend or ProcessBackend(python or sys.executable)
        modules = [located(module) for module in custom_modules]
        self._options = WorkerOptions(modules, dict(environment or {}), max_kept=max_kept)
        self._start_timeout = start_timeout
        self._failed: list[tuple[int, Result]] = []
        self._workers: list[WorkerHandle] = []
        try:
            for worker_id in range(-(-num_slots // envs_per_worker)):
                self._workers.append(self._start(worker_id))
            for worker in range(len(self._workers) if wait else 0):
                self._await_hello(worker)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def num_slots(self) -> int:
        """Number of slots in any state."""
        return self._num_slots

    @property
    def num_workers(self) -> int:
        """Number of workers in any state."""
        return len(self._workers)

    def worker_of(self, slot: int) -> int:
        """Index of the worker that a slot belongs to."""
        return slot // self._envs_per_worker

    def slots_of(self, worker_id: int) -> range:
        """The slots of a worker."""
        first = worker_id * self._envs_per_worker
        return range(first, min(first + self._envs_per_worker, self._num_slots))

    def state(self, slot: int) -> WorkerState:
        """State of a slot, as known to the pool."""
        worker, local = self._locate(slot)
        if worker.state is not WorkerState.IDLE:
            return worker.state
        return WorkerState.BUSY if local in worker.pending else WorkerState.IDLE

    def pid(self, slot: int) -> int:
        """Process id of a slot's worker on its machine."""
        return self._locate(slot)[0].channel.pid

    def phase(self, slot: int) -> str:
        """Phase of a slot's last command: start, or one of `PHASES`."""
        worker, local = self._locate(slot)
        return worker.slots[local].phase

    def holds(self, slot: int) -> EnvSpec | None:
        """The current environment of a slot, which a reset reuses."""
        worker, local = self._locate(slot)
        return worker.slots[local].built

    def keeps(self, slot: int) -> list[EnvSpec]:
        """Current and cached environments of a slot, most recent first."""
        worker, local = self._locate(slot)
        entry = worker.slots[local]
        return [*([] if entry.built is None else [entry.built]), *reversed(entry.kept)]

    def rss_bytes(self, slot: int) -> int:
        """Resident memory in bytes of a slot's worker; 0 if unknown or ended."""
        return self._locate(slot)[0].channel.rss_bytes()

    def failure(
        self, slot: int, message: str, *, collateral: bool = False, kind: str = "ended", error_type: str | None = None
    ) -> EnvWorkerError:
        """Create a failure report for a slot, for callers that detect failures; see `EnvWorkerError`."""
        worker, local = self._locate(slot)
        return worker.error(local, message, collateral=collateral, kind=kind, error_type=error_type)

    def executing(self, worker_id: int) -> list[int]:
        """Slots whose commands a worker is executing: several only in a batched environment."""
        worker = self._workers[worker_id]
        return [worker.first + local for local in worker.executing()]

    def busy_seconds(self, slot: int) -> float:
        """Seconds for which the worker has been executing a slot's command, or starting.

        0 if the slot has no pending answer or its command waits for other slots of the worker. Of commands executed
        together, only the first one counts.
        """
        worker, local = self._locate(slot)
        executing = worker.state is WorkerState.BUSY or (
            worker.state is WorkerState.IDLE and worker.pending[:1] == [local]
        )
        return time.monotonic() - worker.since if executing else 0.0

    def submit(self, slot: int, command: Command) -> None:
        """Send a command to an idle slot without blocking; `wait` returns the answer.

        `wait` reports all failures, including that the process has ended or that there is not enough shared memory for
        the command's arrays.

        Raises:
            RuntimeError: the slot is busy or its worker is dead.
        """
        self.submit_all([(slot, command)])

    def submit_all(self, commands: Sequence[SlotCommand]) -> None:
        """Send commands to several idle slots, one message per worker; see `submit`."""
        by_worker: dict[int, list[SlotCommand]] = {}
        for slot, command in commands:
            state = self.state(slot)
            if state is not WorkerState.IDLE:
                remedy = "wait for its answer" if state is WorkerState.BUSY else "restart it"
                raise RuntimeError(f"{self._name(slot)} is {state.value}: {remedy} first")
            worker_id = self.worker_of(slot)
            by_worker.setdefault(worker_id, []).append((slot - self._workers[worker_id].first, command))
        for worker_id, group in by_worker.items():
            worker = self._workers[worker_id]
            try:
                worker.send(group)
            except WorkerGoneError:
                pass  # `wait` reads earlier answers first, then reports the end
            except OSError as error:  # no shared memory left
                message = f"the command could not be sent: {error}"
                self._failed += [
                    (worker.first + local, worker.error(local, message, kind="unsent")) for local, _ in group
                ]

    def wait(self, timeout: float | None = None) -> list[tuple[int, Result]]:
        """Wait for at least one answer and return all that have arrived.

        Args:
            timeout: maximum seconds to wait; None waits indefinitely, 0 does not wait.

        Returns:
            (slot, result) pairs, empty after a timeout or if no slot is busy. A result is the answer to the command, an
            `EnvWorkerError`, or the worker's `ConfigError`; exceptions are returned rather than raised so that other
            answers are not lost. For a worker restarted without waiting, its first slot gets the `Hello` or the error.
            Arrays belong to the caller.
        """
        results, self._failed = self._failed, []
        busy = {
            worker.channel: worker
            for worker in self._workers
            if worker.state is WorkerState.BUSY or (worker.state is WorkerState.IDLE and worker.pending)
        }
        if busy:
            for channel in self._backend.wait(list(busy), 0.0 if results else timeout):
                results += self._collect(busy[channel])
        return results

    def call(self, slot: int, command: Command, timeout: float | None = None) -> Answer:
        """Submit a command while all slots are idle, and wait for the answer.

        Raises:
            EnvWorkerError, ConfigError: as returned by `wait`.
            TimeoutError: no answer in time; the slot stays busy.
        """
        if any(self.state(other) is WorkerState.BUSY for other in range(self._num_slots)):
            raise RuntimeError("call needs an idle pool, but another worker is busy; use submit and wait")
        self.submit(slot, command)
        results = self.wait(timeout)
        if not results:
            raise TimeoutError(f"{self._name(slot)} gave no answer within {timeout} s")
        result = results[0][1]
        if isinstance(result, Exception):
            raise result
        assert not isinstance(result, Hello)  # no worker is starting: all were idle
        return result

    def restart(self, slot: int, *, wait: bool = True) -> None:
        """Kill the worker of a slot and start a new one, regardless of the state of its slots.

        Outstanding answers of the worker are discarded.

        Args:
            slot: any slot of the worker.
            wait: block until the new process is ready; otherwise its slots are busy until `wait` returns its `Hello`.

        Raises:
            EnvWorkerError: the new process did not start.
        """
        worker_id = self.worker_of(slot)
        worker = self._workers[worker_id]
        worker.channel.kill()
        self._reap(worker)
        self._failed = [item for item in self._failed if self.worker_of(item[0]) != worker_id]
        self._workers[worker_id] = self._start(worker_id)
        if wait:
            self._await_hello(worker_id)

    def close(self) -> None:
        """End all workers: idle ones may close their environments, busy ones are terminated. Safe to call twice."""
        alive = [worker for worker in self._workers if worker.state is not WorkerState.DEAD]
        idle = [worker.channel for worker in alive if worker.state is WorkerState.IDLE and not worker.pending]
        busy = [worker.channel for worker in alive if worker.state is WorkerState.BUSY or worker.pending]
        for worker in self._workers:
            worker.state = WorkerState.DEAD
        self._backend.close(idle, busy)

    def _locate(self, slot: int) -> tuple[WorkerHandle, int]:
        """A slot's worker and its index in that worker."""
        if not 0 <= slot < self._num_slots:
            raise IndexError(f"the pool has slots 0..{self._num_slots - 1}, not {slot}")
        worker = self._workers[self.worker_of(slot)]
        return worker, slot - worker.first

    def _name(self, slot: int) -> str:
        worker, local = self._locate(slot)
        return worker_name(worker.worker_id, worker.shown(local))

    def _start(self, worker_id: int) -> WorkerHandle:
        slots = self.slots_of(worker_id)
        options = replace(self._options, num_slots=len(slots))
        return WorkerHandle(worker_id, slots.start, options, self._backend.start(options))

    def _await_hello(self, worker_id: int) -> None:
        worker = self._workers[worker_id]
        if not self._backend.wait([worker.channel], self._start_timeout):
            worker.channel.kill()
            self._reap(worker)
            raise worker.error(0, f"not ready after {self._start_timeout:g} s", kind="late")
        [(_, hello)] = self._collect(worker)
        if isinstance(hello, Exception):
            raise hello

    def _collect(self, worker: WorkerHandle) -> list[tuple[int, Result]]:
        try:
            message = worker.channel.receive()
        except WorkerGoneError:
            return self._reap(worker)
        except DecodeError as error:  # what follows may be out of step
            worker.channel.kill()
            return self._reap(worker, f"sent a message that cannot be decoded ({error}) and was killed", "bad_answer")
        if isinstance(message, Hello):
            return self._greet(worker, message)
        worker.since = time.monotonic()
        answers = sorted(message, key=lambda item: isinstance(item[1], Failure))  # failures may discard environments
        return [(worker.first + slot, worker.take(slot, answer)) for slot, answer in answers]

    def _greet(self, worker: WorkerHandle, hello: Hello) -> list[tuple[int, Result]]:
        """Check that the worker has the protocol and rlvla version of this process; otherwise kill it."""
        if (hello.protocol, hello.rlvla) != (PROTOCOL_VERSION, __version__):
            message = (
                f"{worker.channel.place} has rlvla {hello.rlvla} (worker protocol {hello.protocol}), this process has "
                f"rlvla {__version__} (worker protocol {PROTOCOL_VERSION}); install the same version in both"
            )
            worker.channel.kill()
            return self._reap(worker, message)
        worker.state = WorkerState.IDLE
        return [(worker.first, hello)]

    def _reap(self, worker: WorkerHandle, account: str | None = None, kind: str = "ended") -> list[tuple[int, Result]]:
        """Ensure that a worker's process has ended, and return the failures of all slots with a pending answer.

        Failures of commands that had not started are collateral.

        Args:
            worker: the worker to reap.
            account: error message; by default, the description of the process end.
            kind: one of `FAULT_KINDS`.
        """
        starting = worker.state is WorkerState.BUSY
        if worker.state is not WorkerState.DEAD:
            worker.state = WorkerState.DEAD
            worker.end = worker.channel.reap()
        failed, cause = worker.pending or ([0] if starting else []), worker.executing() or [0]
        worker.pending = []
        return [
            (worker.first + slot, worker.error(slot, account or worker.end, collateral=slot not in cause, kind=kind))
            for slot in failed
        ]

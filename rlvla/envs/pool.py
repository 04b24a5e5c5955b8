"""Workers with an environment each, driven from one thread without ever blocking it."""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rlvla.envs.backend import Backend, Channel, WorkerGoneError, WorkerOptions
from rlvla.envs.messages import (
    PROTOCOL_VERSION,
    Answer,
    Command,
    EnvSpec,
    Failure,
    Hello,
    Make,
    PrivilegedState,
    Reset,
    RunExpert,
    StepChunk,
)
from rlvla.envs.processes import ProcessBackend
from rlvla.utils.errors import ConfigError
from rlvla.version import __version__


class WorkerState(enum.Enum):
    """What a worker is doing: IDLE takes a command, BUSY owes an answer, DEAD needs `EnvPool.restart`."""

    IDLE = "idle"
    BUSY = "busy"
    DEAD = "dead"


class EnvWorkerError(RuntimeError):
    """A worker raised an exception, or its process ended.

    Attributes:
        worker_id: which worker.
        phase: what it was doing: start, import, or one of `PHASES`.
        suite, task_id, init_state_id, seed: the environment and the episode, None where there is none.
        error_type: class name of the exception; None where the process ended.
        worker_traceback: the worker's traceback; empty where the process ended.
    """

    def __init__(
        self,
        message: str,
        *,
        worker_id: int,
        phase: str,
        spec: EnvSpec | None = None,
        init_state_id: int | None = None,
        seed: int | None = None,
        error_type: str | None = None,
        worker_traceback: str = "",
    ):
        self.worker_id = worker_id
        self.phase = phase
        self.suite = spec.suite if spec else None
        self.task_id = spec.task_id if spec else None
        self.init_state_id = init_state_id
        self.seed = seed
        self.error_type = error_type
        self.worker_traceback = worker_traceback
        where = f"environment worker {worker_id}, phase {phase}"
        if spec is not None:
            where += f", {spec.suite} task {spec.task_id}"
        if seed is not None:
            where += f", initial state {init_state_id}, seed {seed}"
        super().__init__(f"{where}: {message}" + (f"\n{worker_traceback}" if worker_traceback else ""))


# What comes of a command, or of a start that nobody waited for.
Result = Answer | Hello | EnvWorkerError | ConfigError
# The phase of a worker that executes a command.
PHASES: dict[type, str] = {
    Make: "make",
    Reset: "reset",
    StepChunk: "step_chunk",
    RunExpert: "run_expert",
    PrivilegedState: "privileged_state",
}


class _WorkerHandle:
    """A worker as the pool sees it."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.state = WorkerState.BUSY  # until it has said hello
        self.end = ""  # how its process ended
        self.command: Command | None = None
        self.busy_since = time.monotonic()
        # The environment and the episode it plays, for error messages.
        self.spec: EnvSpec | None = None
        self.built: EnvSpec | None = None  # the environment it is known to hold
        self.init_state_id: int | None = None
        self.seed: int | None = None

    @property
    def phase(self) -> str:
        return "start" if self.command is None else PHASES[type(self.command)]

    def note(self, command: Command) -> None:
        """Remember what is being done."""
        self.command = command
        self.busy_since = time.monotonic()
        if not isinstance(command, StepChunk | PrivilegedState):
            self.spec = command.env
            self.init_state_id = getattr(command, "init_state_id", None)
            self.seed = getattr(command, "seed", None)

    def error(self, worker_id: int, message: str, failure: Failure | None = None) -> EnvWorkerError:
        """The report of a failure in what is being done; `failure` is the worker's own account."""
        return EnvWorkerError(
            message,
            worker_id=worker_id,
            phase=failure.phase if failure else self.phase,
            spec=self.spec,
            init_state_id=self.init_state_id,
            seed=self.seed,
            error_type=failure.error_type if failure else None,
            worker_traceback=failure.traceback if failure else "",
        )


class EnvPool:
    """Workers, each with one environment at a time.

    Commands are submitted without waiting and their answers collected with `wait`, so that whatever else there is to
    do (a forward pass of the policy) overlaps with the simulation:

        with EnvPool(4) as pool:
            pool.submit(0, Reset(EnvSpec("toy_reach", 0), init_state_id=3, seed=0))
            for worker_id, result in pool.wait():
                ...

    Use it from one thread that lives as long as the pool: the kernel kills the workers when the thread that started
    them ends, however it ends.

    Args:
        num_workers: how many, numbered from 0.
        backend: where they run; by default as processes of this machine.
        python: the interpreter of those processes, by default that of this one; not together with `backend`.
        custom_modules: modules (`.py` files, or dotted names of what is installed or on PYTHONPATH) that a worker
            imports first, to register suites.
        environment: environment variables for the workers beyond those of this process.
        start_timeout: seconds that the workers may take to start.

    Raises:
        EnvWorkerError: a worker did not start, or belongs to another version of rlvla.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        backend: Backend[Any] | None = None,
        python: str | None = None,
        custom_modules: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 120.0,
    ):
        if num_workers < 1:
            raise ConfigError(f"an environment pool needs at least one worker, not {num_workers}")
        if backend is not None and python is not None:
            raise ConfigError(f"python={python!r} is for worker processes of this machine, not for another backend")
        self._backend: Backend[Any] = backend or ProcessBackend(python or sys.executable)
        # Another working directory in the worker must not change what a relative path means.
        modules = [str(Path(m).resolve()) if m.endswith(".py") else m for m in custom_modules]
        self._options = WorkerOptions(modules, dict(environment or {}))
        self._start_timeout = start_timeout
        self._failed: list[tuple[int, Result]] = []
        self._workers: list[_WorkerHandle] = []
        try:
            for _ in range(num_workers):
                self._workers.append(self._start())
            for worker_id in range(num_workers):
                self._await_hello(worker_id)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_workers(self) -> int:
        """How many workers there are, whatever their state."""
        return len(self._workers)

    def state(self, worker_id: int) -> WorkerState:
        """What that worker is doing, as far as the pool knows."""
        return self._workers[worker_id].state

    def pid(self, worker_id: int) -> int:
        """The process id of that worker, on the machine where it runs."""
        return self._workers[worker_id].channel.pid

    def phase(self, worker_id: int) -> str:
        """What that worker did last: start, or one of `PHASES`."""
        return self._workers[worker_id].phase

    def holds(self, worker_id: int) -> EnvSpec | None:
        """The environment that worker is known to have built, so that a reset will not build another."""
        return self._workers[worker_id].built

    def rss_bytes(self, worker_id: int) -> int:
        """Resident memory of that worker's process; 0 where it is not known, or the process is gone."""
        return self._workers[worker_id].channel.rss_bytes()

    def failure(self, worker_id: int, message: str) -> EnvWorkerError:
        """A report about what that worker is doing, for a caller that judges it from outside."""
        return self._workers[worker_id].error(worker_id, message)

    def busy_seconds(self, worker_id: int) -> float:
        """How long that worker has owed an answer; 0 if it owes none."""
        worker = self._workers[worker_id]
        return time.monotonic() - worker.busy_since if worker.state is WorkerState.BUSY else 0.0

    def submit(self, worker_id: int, command: Command) -> None:
        """Give a command to an idle worker and return at once; `wait` delivers the answer.

        A process found dead here is reported by `wait` like any other failure.

        Raises:
            RuntimeError: the worker is busy, or known to be dead.
            OSError: no shared memory left for the arrays of the command; the worker stays idle.
        """
        worker = self._workers[worker_id]
        if worker.state is not WorkerState.IDLE:
            remedy = "wait for its answer" if worker.state is WorkerState.BUSY else "restart it"
            raise RuntimeError(f"environment worker {worker_id} is {worker.state.value}: {remedy} first")
        gone = False
        try:
            worker.channel.send(command)
        except WorkerGoneError:
            gone = True
        worker.note(command)
        worker.state = WorkerState.BUSY
        if gone:
            self._failed.append((worker_id, self._bury(worker_id)))

    def wait(self, timeout: float | None = None) -> list[tuple[int, Result]]:
        """Collect answers, waiting until there is at least one.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes, 0 not at all.

        Returns:
            (worker id, result) pairs, empty after a timeout or when no worker is busy. A result is the answer to the
            command, the `Hello` of a worker restarted without waiting, an `EnvWorkerError`, or the `ConfigError` that
            the worker met: an exception is handed over and not raised, so that no other worker's answer is lost with
            it. Arrays belong to the caller.
        """
        results, self._failed = self._failed, []
        busy = {w.channel: i for i, w in enumerate(self._workers) if w.state is WorkerState.BUSY}
        if busy:
            ready = self._backend.wait(list(busy), 0.0 if results else timeout)
            results += [(busy[channel], self._collect(busy[channel])) for channel in ready]
        return results

    def call(self, worker_id: int, command: Command, timeout: float | None = None) -> Answer:
        """Submit a command to an idle worker while all others are idle too, and wait for the answer.

        Raises:
            EnvWorkerError, ConfigError: what `wait` would have returned.
            TimeoutError: no answer in time; the worker stays busy.
        """
        if any(worker.state is WorkerState.BUSY for worker in self._workers):
            raise RuntimeError("call is for a pool that is otherwise idle: another worker is busy; use submit and wait")
        self.submit(worker_id, command)
        results = self.wait(timeout)
        if not results:
            raise TimeoutError(f"environment worker {worker_id} gave no answer within {timeout} s")
        result = results[0][1]
        if isinstance(result, Exception):
            raise result
        assert not isinstance(result, Hello)  # no worker is starting: all were idle
        return result

    def restart(self, worker_id: int, *, wait: bool = True) -> None:
        """Kill that worker, whatever it is doing, and start another in its place.

        An answer that it still owed is never delivered.

        Args:
            worker_id: which worker.
            wait: until the new process is ready; otherwise the worker is busy until `wait` delivers its `Hello`.

        Raises:
            EnvWorkerError: the new process did not start.
        """
        self._workers[worker_id].channel.kill()
        self._bury(worker_id)
        self._failed = [item for item in self._failed if item[0] != worker_id]
        self._workers[worker_id] = self._start()
        if wait:
            self._await_hello(worker_id)

    def close(self) -> None:
        """End all workers: an idle one may close its environment, a busy one is terminated. Safe to call twice."""
        idle = [worker.channel for worker in self._workers if worker.state is WorkerState.IDLE]
        busy = [worker.channel for worker in self._workers if worker.state is WorkerState.BUSY]
        for worker in self._workers:
            worker.state = WorkerState.DEAD
        self._backend.close(idle, busy)

    def _start(self) -> _WorkerHandle:
        return _WorkerHandle(self._backend.start(self._options))

    def _await_hello(self, worker_id: int) -> None:
        worker = self._workers[worker_id]
        if not self._backend.wait([worker.channel], self._start_timeout):
            worker.channel.kill()
            self._bury(worker_id)
            raise worker.error(worker_id, f"not ready after {self._start_timeout:g} s")
        hello = self._greet(worker_id)
        if isinstance(hello, Exception):
            raise hello

    def _greet(self, worker_id: int) -> Hello | EnvWorkerError:
        """Read the first message of a worker."""
        worker = self._workers[worker_id]
        try:
            hello = worker.channel.receive()
        except WorkerGoneError:
            return self._bury(worker_id)
        theirs = (hello.protocol, hello.rlvla) if isinstance(hello, Hello) else (None, None)
        if theirs != (PROTOCOL_VERSION, __version__):
            self._bury(worker_id)
            return EnvWorkerError(
                f"{worker.channel.place} has rlvla {theirs[1]} (worker protocol {theirs[0]}), this process has rlvla "
                f"{__version__} (worker protocol {PROTOCOL_VERSION}); install the same version in both",
                worker_id=worker_id,
                phase="start",
            )
        worker.state = WorkerState.IDLE
        return hello

    def _collect(self, worker_id: int) -> Result:
        worker = self._workers[worker_id]
        if worker.command is None:
            return self._greet(worker_id)
        try:
            reply = worker.channel.receive()
        except WorkerGoneError:
            return self._bury(worker_id)
        except Exception as error:  # bytes that are no message, or a reference to memory that is not there
            worker.channel.kill()
            self._bury(worker_id)
            return worker.error(worker_id, f"sent an answer that cannot be read ({error!r}) and was killed")
        worker.state = WorkerState.IDLE
        if not isinstance(reply, Failure):
            worker.built = worker.spec
            return reply
        worker.built = None  # it throws its environment away
        if reply.problems:
            return ConfigError(reply.problems)
        return worker.error(worker_id, f"{reply.error_type}: {reply.message}", reply)

    def _bury(self, worker_id: int) -> EnvWorkerError:
        """Make sure that a worker's process is gone; returns the report of its end."""
        worker = self._workers[worker_id]
        if worker.state is not WorkerState.DEAD:
            worker.state = WorkerState.DEAD
            worker.end = worker.channel.bury()
        return worker.error(worker_id, worker.end)

"""The pool's view of a worker: the state of its slots, and its failure reports."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.envs.registry import get_suite, registered_suites
from rlvla.envs.workers.backend import Channel
from rlvla.envs.workers.codec import UnreadableError
from rlvla.envs.workers.messages import (
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
    SlotAnswer,
    SlotCommand,
    StepChunk,
)
from rlvla.utils.errors import ConfigError


class WorkerState(enum.Enum):
    """State of a slot: IDLE accepts a command, BUSY has a pending answer, DEAD needs `EnvPool.restart`."""

    IDLE = "idle"
    BUSY = "busy"
    DEAD = "dead"


# How an environment can fail: an exception, the end of its process, a time limit, a message that cannot be read, an
# answer that breaks the contract, a command that could not be sent, and (lost) a failure of another slot.
FAULT_KINDS = ("exception", "ended", "late", "unreadable", "bad_answer", "unsent", "lost")


class EnvWorkerError(RuntimeError):
    """A worker raised an exception or its process ended.

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
    RunExpert: "run_expert",
    PlayActions: "play_actions",
    PrivilegedState: "privileged_state",
}


# Command -> type of its answer.
ANSWERS: dict[type, type] = {
    Make: TaskSpec,
    Reset: Observation,
    StepChunk: ChunkResult,
    RunExpert: dict,
    PlayActions: dict,
    PrivilegedState: dict,
}


class _Slot:
    """The pool's view of a slot."""

    def __init__(self) -> None:
        self.command: Command | None = None
        # Environment and episode, for error messages.
        self.spec: EnvSpec | None = None
        self.built: EnvSpec | None = None  # the environment it is known to have
        self.kept: list[EnvSpec] = []  # those that it keeps besides, the one played last at the end
        self.init_state_id: int | None = None
        self.seed: int | None = None
        self.sent = 0.0  # when the command was sent to the worker
        self.lost = False  # its episode was lost by a failure of another slot that shares its environment

    @property
    def phase(self) -> str:
        return "start" if self.command is None else PHASES[type(self.command)]

    def now_has(self, spec: EnvSpec | None) -> None:
        """It has this environment, and keeps others as workers do."""
        if spec is not None and spec != self.built:
            suite = registered_suites().get(spec.suite)
            others = [*self.kept, *([] if self.built is None else [self.built])]
            others = [other for other in others if other != spec]
            self.kept = others[max(0, len(others) - (suite.kept if suite is not None else 0)) :]
        self.built = spec

    def note(self, command: Command) -> None:
        """Record the command, its environment and its episode."""
        self.command = command
        if not isinstance(command, StepChunk | PrivilegedState):
            self.spec = command.env
            self.init_state_id = getattr(command, "init_state_id", None)
            self.seed = getattr(command, "seed", None)

    def joins(self, other: _Slot) -> bool:
        """Whether a single call of a batched environment may execute the commands of both."""
        kind = type(self.command)
        return kind in (Reset, StepChunk) and kind is type(other.command) and self.spec == other.spec and self._shares()

    def _shares(self) -> bool:
        assert self.spec is not None
        try:
            return get_suite(self.spec.suite).offers_batch(self.spec.options)
        except ConfigError:  # a suite registered in the workers only
            return False


class WorkerHandle:
    """The pool's view of a worker: its process, and its slots, numbered from `first` in the pool."""

    def __init__(self, worker_id: int, first: int, num_slots: int, channel: Channel):
        self.worker_id, self.first = worker_id, first
        self.channel = channel
        self.state = WorkerState.BUSY  # until its `Hello` arrives
        self.end = ""  # how its process ended
        self.slots = [_Slot() for _ in range(num_slots)]
        self.owed: list[int] = []  # slots with a pending answer, in the order of their commands
        self.since = time.monotonic()  # start time of the first of them

    def shown(self, slot: int) -> int | None:
        """The slot's number in the pool, for messages; None if each worker has one slot."""
        return self.first + slot if len(self.slots) > 1 or self.first != self.worker_id else None

    def executing(self) -> list[int]:
        """Slots whose commands are being executed: the oldest, and all that the same call may execute."""
        if not self.owed:
            return []
        first = self.slots[self.owed[0]]
        others = [slot for slot in self.owed[1:] if self.slots[slot].sent <= self.since]
        return [self.owed[0], *(slot for slot in others if self.slots[slot].joins(first))]

    def error(
        self,
        slot: int,
        message: str,
        failure: Failure | None = None,
        collateral: bool = False,
        kind: str = "ended",
        error_type: str | None = None,
    ) -> EnvWorkerError:
        """Create the report of a failure in a slot; `failure` is the worker's description of it, if any."""
        known = self.slots[slot]
        return EnvWorkerError(
            message,
            worker_id=self.worker_id,
            slot=self.shown(slot),
            phase=failure.phase if failure else known.phase,
            spec=known.spec,
            init_state_id=known.init_state_id,
            seed=known.seed,
            error_type=failure.error_type if failure else error_type,
            worker_traceback=failure.traceback if failure else "",
            collateral=collateral,
            kind="exception" if failure else kind,
        )

    def send(self, commands: Sequence[SlotCommand]) -> None:
        """Send commands; raises as `Channel.send`. After a `WorkerGoneError`, their answers are also pending."""
        now = time.monotonic()
        if not self.owed:
            self.since = now
        for slot, command in commands:
            self.slots[slot].note(command)
            self.slots[slot].sent = now
            self.owed.append(slot)
        try:
            self.channel.send(commands)
        except OSError:
            del self.owed[-len(commands) :]
            raise

    def check(self, answers: object) -> list[SlotAnswer]:
        """Return the answers, failures last; `UnreadableError` unless each is an answer to a pending command."""
        if not isinstance(answers, list):
            raise UnreadableError("a second greeting")
        slots = {slot for slot, _ in answers}
        if not answers or len(slots) < len(answers) or not slots <= set(self.owed):
            raise UnreadableError(
                f"answers of slots {[slot for slot, _ in answers]} where those of {self.owed} are due"
            )
        for slot, answer in answers:
            command = self.slots[slot].command
            if isinstance(answer, Failure):
                if not all(0 <= other < len(self.slots) for other in answer.closed):
                    raise UnreadableError(f"slots {answer.closed} were closed, of {len(self.slots)}")
            elif not isinstance(answer, ANSWERS[type(command)]):
                raise UnreadableError(f"{type(answer).__name__} in answer to {type(command).__name__}")
        return sorted(answers, key=lambda item: isinstance(item[1], Failure))  # they may discard other environments

    def take(self, slot: int, answer: Answer | Failure) -> Result:
        """Convert the answer to a slot's command to a result and update the slot."""
        self.owed.remove(slot)
        known = self.slots[slot]
        lost, known.lost = known.lost, False
        if not isinstance(answer, Failure):
            known.now_has(known.spec)
            return answer
        known.built = None  # the worker discards the environment
        for closed in answer.closed:
            self.slots[closed].built, self.slots[closed].lost = None, True
        if answer.problems:
            return ConfigError(answer.problems)
        collateral = lost and isinstance(known.command, StepChunk | PrivilegedState)
        return self.error(slot, f"{answer.error_type}: {answer.message}", answer, collateral)

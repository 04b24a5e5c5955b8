"""The protocol between an `EnvPool` and its worker processes.

A worker has slots, each with its own episode. A message is a list of (slot, command) to the worker and of
(slot, answer) from it; within a slot, commands and answers alternate. Arrays are not part of messages: the sender
writes them to the slot's shared memory (`rlvla.envs.workers.slab`), and the message references them. Commands are
pickled, answers are JSON (`rlvla.envs.workers.codec`).
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.envs.experts.base import ExpertConfig
from rlvla.envs.experts.episode import ExpertEpisode
from rlvla.envs.workers.slab import ArrayRef, Slab
from rlvla.utils.errors import Problem

# Increment on every incompatible change.
PROTOCOL_VERSION = 10
# Readable by all supported Python versions: a worker may run in another interpreter.
_PICKLE_PROTOCOL = 4


@dataclass(frozen=True)
class EnvSpec:
    """Arguments of `rlvla.envs.make_env`. A worker reuses its environment as long as the spec is equal."""

    suite: str
    task_id: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Make:
    """Build the environment. Answered by its `TaskSpec`."""

    env: EnvSpec


@dataclass(frozen=True)
class Reset:
    """Start an episode, building the environment first if the slot has another. Answered by an `Observation`."""

    env: EnvSpec
    init_state_id: int
    seed: int


@dataclass(frozen=True)
class StepChunk:
    """Execute actions [A, D] float32 in the running episode. Answered by a `ChunkResult`."""

    actions: np.ndarray
    record_frames: bool = False


@dataclass(frozen=True)
class StepExpert:
    """Execute at most `length` actions of the scripted expert, until the running episode ends.

    Answered by a `ChunkResult` of `length` actions, whose `step_actions` are those of the expert.

    Attributes:
        length: number of actions.
        expert: the expert's errors.
        takeover: seed of the expert's errors where it takes over; None where it has control already.
    """

    length: int
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    takeover: int | None = None


@dataclass(frozen=True)
class RunExpert:
    """Play a complete episode with the scripted expert. Answered by an `ExpertEpisode`.

    With `prefix`, the expert takes over after these actions [S, D] float32.
    """

    env: EnvSpec
    init_state_id: int
    seed: int
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    prefix: np.ndarray | None = None


@dataclass(frozen=True)
class PlayActions:
    """Play a complete episode with these actions [S, D] float32. Answered by an `ExpertEpisode`."""

    env: EnvSpec
    init_state_id: int
    seed: int
    actions: np.ndarray


@dataclass(frozen=True)
class PrivilegedState:
    """Get the simulator state of the running episode. Answered by a dict name -> array."""


WithinEpisode = StepChunk | StepExpert | PrivilegedState
Command = Make | Reset | RunExpert | PlayActions | WithinEpisode
SlotCommand = tuple[int, Command]
Answer = TaskSpec | Observation | ChunkResult | ExpertEpisode | dict[str, np.ndarray]


@dataclass(frozen=True)
class Hello:
    """The first message of a worker."""

    protocol: int
    rlvla: str


@dataclass(frozen=True)
class Failure:
    """An exception in a worker.

    Attributes:
        phase: phase in which it was raised: import, make, reset, step_chunk, step_expert, run_expert, play_actions or
            privileged_state.
        error_type: class name of the exception.
        message: text of the exception.
        traceback: the worker's traceback.
        problems: problems of a ConfigError; empty for other exceptions.
        closed: other slots that lost their episodes because they share the environment.
    """

    phase: str
    error_type: str
    message: str
    traceback: str
    problems: Sequence[Problem] = ()
    closed: Sequence[int] = ()


SlotAnswer = tuple[int, Answer | Failure]


def pack(message: Any, slab: Slab) -> Any:
    """Write the arrays of a message to the slab and replace them by `ArrayRef`s."""
    slab.rewind()
    return replace_leaves(message, np.ndarray, slab.append)


def unpack(message: Any, slab: Slab) -> Any:
    """The inverse of `pack`; arrays are copied."""
    return replace_leaves(message, ArrayRef, slab.read)


def dump_commands(commands: Sequence[tuple[int, Any]]) -> bytes:
    """Serialize packed commands."""
    return pickle.dumps(commands, protocol=_PICKLE_PROTOCOL)


def load_commands(data: bytes) -> list[tuple[int, Any]]:
    """The inverse of `dump_commands`."""
    return pickle.loads(data)


def replace_leaves(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to all values of type `kind` inside dataclasses and dicts."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: replace_leaves(item, kind, function) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{name: replace_leaves(item, kind, function) for name, item in vars(value).items()})
    return value

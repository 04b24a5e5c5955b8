"""What is said between an `EnvPool` and its worker processes.

A command goes down, one answer comes back. Arrays never travel in a message: whoever's turn it is lays them into the
shared slab (`rlvla.envs.slab`), and the message says where they are.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.envs.experts.base import ExpertConfig
from rlvla.envs.experts.episode import ExpertEpisode
from rlvla.envs.slab import ArrayRef, Slab

# Raised whenever a worker of an older version would misunderstand a newer pool, or the other way round.
PROTOCOL_VERSION = 2
# Readable by every supported Python, so that a worker may run in another interpreter.
_PICKLE_PROTOCOL = 4


@dataclass(frozen=True)
class EnvSpec:
    """Which environment a worker is to have: the arguments of `rlvla.envs.make_env`.

    A worker keeps its environment as long as it is asked for an equal one.
    """

    suite: str
    task_id: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Make:
    """Build the environment. Answered by its `TaskSpec`."""

    env: EnvSpec


@dataclass(frozen=True)
class Reset:
    """Start an episode, building the environment first if the worker has another. Answered by an `Observation`."""

    env: EnvSpec
    init_state_id: int
    seed: int


@dataclass(frozen=True)
class StepChunk:
    """Execute actions [A, D] float32 in the running episode. Answered by a `ChunkResult`."""

    actions: np.ndarray
    record_frames: bool = False


@dataclass(frozen=True)
class RunExpert:
    """Play a complete episode with the scripted expert. Answered by an `ExpertEpisode`."""

    env: EnvSpec
    init_state_id: int
    seed: int
    expert: ExpertConfig = field(default_factory=ExpertConfig)


@dataclass(frozen=True)
class PrivilegedState:
    """Tell the simulator's state of the running episode. Answered by a dict name -> array."""


Command = Make | Reset | StepChunk | RunExpert | PrivilegedState
Answer = TaskSpec | Observation | ChunkResult | ExpertEpisode | dict[str, np.ndarray]


@dataclass(frozen=True)
class Hello:
    """The first message of a worker."""

    protocol: int
    rlvla: str
    python: str
    numpy: str


@dataclass(frozen=True)
class Failure:
    """An exception in a worker.

    Attributes:
        phase: what was being done: import, make, reset, step_chunk, run_expert or privileged_state.
        error_type: name of the exception's class.
        message: its text.
        traceback: the worker's traceback.
        problems: the sentences of a ConfigError; empty for any other exception.
    """

    phase: str
    error_type: str
    message: str
    traceback: str
    problems: tuple[str, ...] = ()


def pack(message: Any, slab: Slab) -> Any:
    """The message with its arrays laid into the slab and `ArrayRef`s in their places."""
    slab.rewind()
    return replace_leaves(message, np.ndarray, slab.append)


def unpack(message: Any, slab: Slab) -> Any:
    """The way back from `pack`: the message with copies of the arrays in their places."""
    return replace_leaves(message, ArrayRef, slab.read)


def send_message(connection: Connection, message: object) -> None:
    """Send one message; OSError when the other side is gone."""
    connection.send_bytes(pickle.dumps(message, protocol=_PICKLE_PROTOCOL))


def receive_message(connection: Connection) -> Any:
    """Wait for one message; EOFError or OSError when the other side is gone."""
    return pickle.loads(connection.recv_bytes())


def replace_leaves(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to everything of `kind` inside dataclasses and dicts."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: replace_leaves(item, kind, function) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{name: replace_leaves(item, kind, function) for name, item in vars(value).items()})
    return value

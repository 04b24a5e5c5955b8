"""Schema of a replay buffer: columns, capacity, and the episodes that are appended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Column:
    """A quantity stored for each row.

    Attributes:
        name: unique in a buffer.
        shape: of one row.
        dtype: of numpy; numbers or booleans.
        observation: has a value after the last decision too; otherwise one per decision.
        mapped: kept in a memory-mapped file instead of memory (images). Observations only.

    Raises:
        ValueError: the name is taken or not a word, the dtype is not numeric, or a mapped column is not an observation.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    observation: bool = False
    mapped: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in RESERVED:
            raise ValueError(f"{self.name!r} cannot name a column: it is {'taken' if self.name else 'empty'}")
        if np.dtype(self.dtype).kind not in "biuf":
            raise ValueError(f"column {self.name} has dtype {self.dtype}; columns hold numbers or booleans")
        if self.mapped and not self.observation:
            raise ValueError(f"column {self.name} is mapped but not an observation; only observations can be")
        if min(self.shape, default=1) < 1:
            raise ValueError(f"column {self.name} has shape {self.shape}; its sizes must be positive")

    def describe(self) -> list[Any]:
        """JSON for saved states."""
        return [self.name, list(self.shape), np.dtype(self.dtype).str, self.observation, self.mapped]


# Columns written when the row is appended: name -> dtype. `rewards` are [chunk_len].
CONTENT = {
    "episode": "int64",  # -1: the row is free
    "step": "int64",
    "image_row": "int64",  # row of the mapped columns
    "image_digest": "int64",  # CRC-32 of that row in all mapped columns
    "rewards": "float32",
    "steps": "int64",
    "terminated": "bool",
    "truncated": "bool",
    "init_state": "int64",
    "policy_version": "int64",
}
# Columns updated while the row is in the buffer.
SCORES = {
    "priority": "float64",
    "td_error": "float64",  # NaN until trained on
    "action_score": "float64",  # NaN until judged
    "progress": "float64",  # NaN until judged
    "prioritised_at": "int64",  # update at which the TD error was last computed; -1: never
    "scored_at": "int64",  # update at which scores were last asked for; -1: never
}
RESERVED = {*CONTENT, *SCORES}


@dataclass(frozen=True)
class BufferConfig:
    """Configuration of a replay buffer.

    Attributes:
        columns: the declared columns of a row.
        capacity: maximum number of rows, including one per episode for its last observation.
        chunk_len: actions per decision.
        eviction: of whole episodes; "fifo": the oldest, "value": least mean priority, never the newest 10 %.

    Raises:
        ValueError: a number is out of range, the eviction is unknown, or two columns have one name.
    """

    columns: tuple[Column, ...]
    capacity: int = 100_000
    chunk_len: int = 1
    eviction: str = "fifo"

    def __post_init__(self) -> None:
        for name, least in (("capacity", 2), ("chunk_len", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if self.eviction not in ("fifo", "value"):
            raise ValueError(f"eviction is {self.eviction!r}; known: fifo, value")
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"two columns have the same name: {', '.join(sorted(names))}")

    def describe(self) -> dict[str, Any]:
        """JSON that a saved state must match."""
        return {
            "capacity": self.capacity,
            "chunk_len": self.chunk_len,
            "columns": [column.describe() for column in self.columns],
        }


@dataclass(frozen=True)
class Episode:
    """An episode of S decisions.

    Attributes:
        columns: the declared columns, observations [S + 1, ...] (with the one after the last action), others [S, ...].
        rewards: [S, chunk_len] per env step; entries beyond `steps` are not read.
        steps: [S] env steps of each decision.
        terminated, truncated: how it ended; an episode with neither was cut off and bootstraps like a truncated one.
        init_state: initial state.
        policy_version: version of the acting policy, one number or [S].
        action_score, progress: [S], or None until judged.
    """

    columns: Mapping[str, ArrayLike]
    rewards: ArrayLike
    steps: ArrayLike
    terminated: bool
    truncated: bool
    init_state: int = 0
    policy_version: ArrayLike = 0
    action_score: ArrayLike | None = None
    progress: ArrayLike | None = None
    num_decisions: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_decisions", len(np.asarray(self.steps)))

    def rows(self, columns: Sequence[Column], chunk_len: int) -> dict[str, Array]:
        """All columns but `image_row` of its S + 1 rows; per-decision columns are 0 or NaN in the last row.

        Raises:
            ValueError: a column is missing or not declared, a shape or dtype is not the declared one, or the number of
                env steps is not in 1..chunk_len.
        """
        count = self.num_decisions
        declared = {column.name for column in columns}
        if declared != set(self.columns):
            raise ValueError(f"the episode has columns {sorted(self.columns)}; declared are {sorted(declared)}")
        steps = np.asarray(self.steps)
        if not count or steps.ndim != 1 or steps.min() < 1 or steps.max() > chunk_len:
            raise ValueError(f"steps is {steps}; each of the decisions takes 1..{chunk_len} env steps")
        rows = {}
        for column in columns:
            shape = (count + column.observation, *column.shape)
            values = _checked(column.name, self.columns[column.name], shape, column.dtype)
            rows[column.name] = values if column.observation else _with_last_row(values)
        rows["rewards"] = _with_last_row(_checked("rewards", self.rewards, (count, chunk_len), "float32"))
        rows["steps"] = _with_last_row(steps.astype(np.int64))
        last = np.arange(count + 1) == count - 1
        rows["terminated"], rows["truncated"] = last & bool(self.terminated), last & bool(self.truncated)
        rows["init_state"] = np.full(count + 1, self.init_state, dtype=np.int64)
        versions = np.broadcast_to(np.asarray(self.policy_version, dtype=np.int64), (count,))
        rows["policy_version"] = _with_last_row(versions)
        for name in ("action_score", "progress"):
            scores = np.full(count, np.nan) if getattr(self, name) is None else getattr(self, name)
            rows[name] = np.append(_checked(name, scores, (count,), "float64"), np.nan)
        return rows


def _checked(name: str, values: ArrayLike, shape: tuple[int, ...], dtype: str) -> Array:
    array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; {shape} is needed")
    if not np.can_cast(array.dtype, dtype, casting="same_kind"):
        raise ValueError(f"{name} is {array.dtype}; {dtype} is declared")
    return array.astype(dtype, copy=False)


def _with_last_row(values: Array) -> Array:
    """Append a row of zeros."""
    return np.concatenate([values, np.zeros_like(values[:1])])

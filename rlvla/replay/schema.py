"""What a buffer holds: columns, its size, and the episodes that are appended."""

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
        observation: it has a value after the last decision too; otherwise it belongs to decisions.
        mapped: kept in a memory-mapped file instead of memory (images). Observations only.

    Raises:
        ValueError: the name is taken or not a word, the dtype is not of numbers, or a mapped column is no observation.
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
            raise ValueError(f"column {self.name} is mapped but no observation; only observations can be")
        if min(self.shape, default=1) < 1:
            raise ValueError(f"column {self.name} has shape {self.shape}; its sizes must be positive")

    def describe(self) -> list[Any]:
        """As it stands in a saved state."""
        return [self.name, list(self.shape), np.dtype(self.dtype).str, self.observation, self.mapped]


# Written once, when the row is appended: name -> dtype. `rewards` are [chunk_len].
CONTENT = {
    "episode": "int64",  # -1: the row is free
    "step": "int64",
    "image_row": "int64",  # where the mapped columns of the row are
    "rewards": "float32",
    "steps": "int64",
    "terminated": "bool",
    "truncated": "bool",
    "init_state": "int64",
    "policy_version": "int64",
}
# Change while the row is in the buffer.
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
    """What a buffer holds.

    Attributes:
        columns: the declared columns of a row.
        capacity: rows, those of last observations included.
        chunk_len: actions per decision.
        eviction: whole episodes leave; "fifo": the oldest, "value": that of least mean priority, never the newest 10 %.
        window: rows of the windows that are drawn; 1 draws single rows.
        window_priority: "mean" or "max" of the priorities of its rows is that of a window.

    Raises:
        ValueError: a number is not positive, a choice is unknown, or two columns have one name.
    """

    columns: tuple[Column, ...]
    capacity: int = 100_000
    chunk_len: int = 1
    eviction: str = "fifo"
    window: int = 1
    window_priority: str = "mean"

    def __post_init__(self) -> None:
        for name, least in (("capacity", 2), ("chunk_len", 1), ("window", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        for name, known in (("eviction", ("fifo", "value")), ("window_priority", ("mean", "max"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}")
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"two columns have the same name: {', '.join(sorted(names))}")

    def describe(self) -> dict[str, Any]:
        """What a saved state must agree on."""
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
        terminated, truncated: how it ended; neither means that it was cut off, which bootstraps as well.
        init_state: initial state.
        policy_version: of the policy that acted, one number or [S].
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
        """All columns of its S + 1 rows, without `image_row`; what belongs to decisions is 0 or NaN in the last row.

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
        found = {}
        for column in columns:
            wanted = (count + column.observation, *column.shape)
            values = _fitting(column.name, self.columns[column.name], wanted, column.dtype)
            found[column.name] = values if column.observation else _one_more(values)
        found["rewards"] = _one_more(_fitting("rewards", self.rewards, (count, chunk_len), "float32"))
        found["steps"] = _one_more(steps.astype(np.int64))
        last = np.arange(count + 1) == count - 1
        found["terminated"], found["truncated"] = last & bool(self.terminated), last & bool(self.truncated)
        found["init_state"] = np.full(count + 1, self.init_state, dtype=np.int64)
        versions = np.broadcast_to(np.asarray(self.policy_version, dtype=np.int64), (count,))
        found["policy_version"] = _one_more(versions)
        for name in ("action_score", "progress"):
            scores = np.full(count, np.nan) if getattr(self, name) is None else getattr(self, name)
            found[name] = np.append(_fitting(name, scores, (count,), "float64"), np.nan)
        return found


def _fitting(name: str, values: ArrayLike, shape: tuple[int, ...], dtype: str) -> Array:
    array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; {shape} is needed")
    if not np.can_cast(array.dtype, dtype, casting="same_kind"):
        raise ValueError(f"{name} is {array.dtype}; {dtype} is declared")
    return array.astype(dtype, copy=False)


def _one_more(values: Array) -> Array:
    """With a row of zeros at the end."""
    return np.concatenate([values, np.zeros_like(values[:1])])

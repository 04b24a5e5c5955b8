"""Consistency checks of stored episodes, made by all readers before the first image is read.

A reader describes its episodes as `StoredEpisode`s; `check_episodes` reports all problems at once: shapes and dtypes of
all arrays, and the values of the small ones; images are not read.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.utils.budgets import gib, over_memory
from rlvla.utils.errors import ConfigError, Problem

LARGEST_ARRAY = 2**31  # bytes of an array of numbers of an episode
REPORTED = 10  # problems of a file that are listed; the others are counted
_LONGEST_VALUE = 60  # characters
_LARGEST = float(np.finfo(np.float32).max)
# Axes of an episode -> length, for messages; the other axes have the same size in all episodes.
_EPISODE_AXES = {"steps": "one row per action", "decisions": "one row per decision"}
# Kind of an array -> kinds of numpy dtypes, and their name.
_KINDS = {
    "numbers": ("fiu", "numbers"),
    "rewards": ("fiub", "numbers"),
    "decisions": ("iu", "whole numbers"),
    "flags": ("b", "true or false"),
    "images": ("u", "uint8"),
}
_EXPECTED = {"text": "one line of text", "number": "a whole number", "flag": "true or false"}


@dataclass
class StoredArray:
    """An array of an episode as stored, and its required form.

    Attributes:
        name: its name in the file.
        array: an array or an HDF5 dataset; None if it is missing.
        axes: the size of each axis: a number, None for any, or a name. Axes of the same name have the same size:
            "steps" and "decisions" within an episode, others in the whole dataset.
        kind: "numbers", "rewards", "flags", "images" (uint8, whose values are not read) or "decisions" (the steps at
            which there are observations: whole numbers that increase from 0).
        optional: whether it may be missing, provided that it is missing in all episodes.
    """

    name: str
    array: Any
    axes: tuple[int | str | None, ...]
    kind: str = "numbers"
    optional: bool = False

    @cached_property
    def values(self) -> np.ndarray:
        """Its content, read once."""
        return np.asarray(self.array[()])


@dataclass
class StoredValue:
    """A single value recorded with an episode.

    Attributes:
        name: its name in the file.
        stored: the value in the file; None if it is missing.
        kind: "text" (one line), "number" (whole, perhaps written as text) or "flag".
        optional: see `StoredArray`.
        minimum: smallest permitted number.
    """

    name: str
    stored: Any
    kind: str
    optional: bool = False
    minimum: int | None = None

    @cached_property
    def value(self) -> Any:
        """The value as str, int or bool; None if it is missing or invalid."""
        if self.kind == "text":
            return _as_text(self.stored)
        if self.kind == "flag":
            whole = isinstance(self.stored, (bool, np.bool_, int, np.integer))
            return bool(self.stored) if whole and self.stored in (0, 1) else None
        number = _as_number(self.stored)
        return None if self.minimum is not None and number is not None and number < self.minimum else number


def _as_text(stored: Any) -> str | None:
    if isinstance(stored, bytes):
        try:
            stored = stored.decode()
        except UnicodeDecodeError:
            return None
    if not isinstance(stored, str) or not stored.strip():
        return None
    return None if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in stored) else str(stored)


def _as_number(stored: Any) -> int | None:
    if isinstance(stored, (int, np.integer)) and not isinstance(stored, bool):
        return int(stored)
    text = _as_text(stored)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


@dataclass
class StoredEpisode:
    """An episode as stored.

    Attributes:
        name: its name in the file, with the file's name if there are several files.
        arrays: its arrays by role; `actions` comes first.
        values: single values by role.
        steps: recorded number of steps, if any.
        problems: further problems.
    """

    name: str
    arrays: dict[str, StoredArray]
    values: dict[str, StoredValue] = field(default_factory=dict)
    steps: int | None = None
    problems: list[str] = field(default_factory=list)


def check_episodes(
    where: str | Path,
    episodes: Sequence[StoredEpisode],
    problems: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Check that the arrays of each episode fit together, and the episodes with each other.

    Args:
        where: the file, for messages.
        episodes: all episodes.
        problems: problems of the file that the reader has found.
        sizes: required sizes of named axes.

    Raises:
        DataError: no episode, or any problem.
    """
    every = [("", text) for text in problems]
    if not episodes and not every:
        every.append(("", "holds no episode"))
    usual = _usual_sizes(episodes) | {name: (size, "recorded") for name, size in (sizes or {}).items()}
    present: dict[str, str] = {}  # role -> first episode that has it
    for episode in episodes:
        for role, array in episode.arrays.items():
            if array.array is not None:
                present.setdefault(role, episode.name)
        for role, value in episode.values.items():
            if value.stored is not None:
                present.setdefault(role, episode.name)
    too_much = list(_memory_problem(episodes))  # then nothing is read
    for episode in episodes if not too_much else ():
        every += [(episode.name, text) for text in _problems(episode, usual, present)]
    every += too_much
    if every:
        raise DataError(where, every)


def refuse(where: str | Path, problems: Sequence[str]) -> None:
    """Raise a DataError with these problems of a file; nothing if there are none."""
    if problems:
        raise DataError(where, [("", text) for text in problems])


class DataError(ConfigError):
    """Invalid data in a file; the message lists the first problems and counts the others.

    Attributes:
        where: the file.
        every: (name of the episode, or "" for the whole file, text) of all problems.
    """

    def __init__(self, where: str | Path, every: Sequence[tuple[str, str]]):
        self.where, self.every = str(where), list(every)
        texts = [f"{name}: {text}" if name else text for name, text in every]
        more = len(texts) - REPORTED
        listed = [*texts[:REPORTED], *([f"and {more} more problem" + "s" * (more > 1)] if more > 0 else [])]
        super().__init__([Problem(None, "invalid_file", f"{where}: {text}") for text in listed])


def camera_problems(names: Any, where: str) -> list[str]:
    """Problems of a list of camera names, which are parts of the names of arrays and files."""
    if not isinstance(names, (list, tuple)) or not names:
        return [f"{where}: cameras is {shortened(names)}; expected a list of names"]
    problems = [
        f"{where}: {shortened(name)} is not a camera name; expected a word without slashes and line breaks"
        for name in names
        if _as_text(name) is None or isinstance(name, bytes) or "/" in name or "\\" in name
    ]
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    return problems + [f"{where}: camera {name} is named twice" for name in twice]


def _usual_sizes(episodes: Sequence[StoredEpisode]) -> dict[str, tuple[int, str]]:
    """Axis -> (most frequent size, its origin), for axes that have the same size in all episodes."""
    counts: dict[str, Counter[int]] = {}
    first: dict[tuple[str, int], str] = {}
    for episode in episodes:
        for stored in episode.arrays.values():
            shape = getattr(stored.array, "shape", None)
            if not isinstance(shape, tuple) or len(shape) != len(stored.axes):
                continue
            for axis, size in zip(stored.axes, shape):
                if isinstance(axis, str) and axis not in _EPISODE_AXES:
                    counts.setdefault(axis, Counter())[size] += 1
                    first.setdefault((axis, size), episode.name)
    usual = {axis: count.most_common(1)[0][0] for axis, count in counts.items()}
    return {axis: (size, f"as in {first[axis, size]}") for axis, size in usual.items()}


def _problems(
    episode: StoredEpisode, usual: Mapping[str, tuple[int, str]], present: Mapping[str, str]
) -> Iterator[str]:
    yield from episode.problems
    sizes = {} if episode.steps is None else {"steps": episode.steps}
    for role, stored in episode.arrays.items():
        if stored.array is not None:
            problem = _shape_problem(stored, sizes, usual) or _value_problem(stored, sizes)
            if problem:
                yield f"{stored.name} {problem}"
        elif not stored.optional or role in present:
            yield _missing(stored, role, episode.name, present)
    for role, value in episode.values.items():
        if value.stored is not None:
            if value.value is None:
                least = "" if value.minimum is None else f" of at least {value.minimum}"
                yield f"{value.name} is {shortened(value.stored)}; expected {_EXPECTED[value.kind]}{least}"
        elif not value.optional or role in present:
            yield _missing(value, role, episode.name, present)


def _missing(missing: StoredArray | StoredValue, role: str, episode: str, present: Mapping[str, str]) -> str:
    other = present.get(role, episode)
    if missing.optional:
        return f"{missing.name} is missing; {other} has it (optional: record it in all episodes or in none)"
    return f"{missing.name} is missing" + (f"; {other} has it" if other != episode else " (every episode needs it)")


def shortened(value: Any) -> str:
    """The repr of a value from a file, cut for messages."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _shape_problem(stored: StoredArray, sizes: dict[str, int], usual: Mapping[str, tuple[int, str]]) -> str | None:
    """Problem of shape or dtype; adds the episode's sizes that this array defines to `sizes`."""
    shape, dtype = getattr(stored.array, "shape", None), getattr(stored.array, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return "is not an array"
    required = {axis: size for axis, (size, _) in usual.items()} | sizes
    expected = [required.get(axis, axis) if isinstance(axis, str) else axis for axis in stored.axes]
    text = ", ".join("any" if size is None else str(size) for size in expected)
    if len(shape) != len(stored.axes):
        return f"has the shape {list(shape)}; expected [{text}]"
    if 0 in shape:
        return f"is empty: its shape is {list(shape)}"
    for axis, size, other in zip(stored.axes, shape, expected):
        if isinstance(other, int) and size != other:
            reason = _EPISODE_AXES.get(str(axis)) or usual.get(str(axis), (0, ""))[1]
            return f"has the shape {list(shape)}; expected [{text}]" + (f", {reason}" if reason else "")
    kinds, name = _KINDS[stored.kind]
    if dtype.kind not in kinds or (stored.kind == "images" and dtype != np.uint8):
        return f"holds {'text' if dtype.kind in 'OSU' else dtype}; expected {name}"
    sizes |= {axis: size for axis, size in zip(stored.axes, shape) if isinstance(axis, str) and axis in _EPISODE_AXES}
    return None


def too_large(array: Any) -> str | None:
    """Problem of the size of an array of numbers or names, which a small file can declare; None if it is read."""
    size = _bytes(array)
    return None if size <= LARGEST_ARRAY else f"would take {gib(size)}; at most 2 GiB are read"


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _memory_problem(episodes: Sequence[StoredEpisode]) -> Iterator[tuple[str, str]]:
    """Arrays that do not fit into memory; a small file can declare any number of them.

    All numbers are kept there, and the images of a camera in one episode while they are read.
    """
    arrays = [
        (_bytes(stored.array), stored.kind == "images", episode.name, stored.name, stored.array.shape)
        for episode in episodes
        for stored in episode.arrays.values()
        if isinstance(getattr(stored.array, "shape", None), tuple) and hasattr(stored.array, "dtype")
    ]
    numbers = sum(size for size, image, *_ in arrays if not image)
    problem = over_memory(numbers + max((size for size, image, *_ in arrays if image), default=0))
    if problem:
        _, _, episode, largest, shape = max(arrays)
        yield episode, f"{largest} has the shape {list(shape)}; it and the numbers of all episodes {problem}"


def _value_problem(stored: StoredArray, sizes: Mapping[str, int]) -> str | None:
    """Problem of the values of an array of the right shape and dtype."""
    if stored.kind in ("images", "flags"):
        return None
    if too_large(stored.array):
        return too_large(stored.array)
    try:
        values = stored.values
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        return f"cannot be read ({error})"
    if stored.kind == "decisions":
        steps = sizes.get("steps", np.inf)
        from_takeover = values[0] > 0 and len(values) == steps - values[0]  # to the end
        if (values[0] == 0 or from_takeover) and (np.diff(values) > 0).all() and values[-1] < steps:
            return None
        return f"is {shortened(values.tolist())}; expected increasing steps of the episode from 0 on"
    if np.abs(values).max() <= _LARGEST:  # false for NaN, too
        return None
    rows = np.flatnonzero(~(np.abs(values.reshape(len(values), -1)) <= _LARGEST).all(axis=1))
    return f"holds NaN, infinity or a number too large for float32 in row {rows[0]}"

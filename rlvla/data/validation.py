"""Checks that the arrays of every episode fit together, made by all readers before the first image is read.

A reader describes its episodes as `StoredEpisode`s, and `check_episodes` reports all that is wrong with them at once.
It looks at shapes and dtypes of all arrays, and at the values of the small ones; images are not read.
"""

from __future__ import annotations

import math
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.utils.errors import ConfigError, Problem

LARGEST_ARRAY = 2**31  # bytes of an array of numbers of an episode
REPORTED = 10  # problems of a file that are listed; the others are counted
_LONGEST_VALUE = 60  # characters
_LARGEST = float(np.finfo(np.float32).max)
# Axes that belong to an episode; the others have the same size in all episodes.
_STEPS, _DECISIONS = "steps", "decisions"
_REASONS = {_STEPS: "one row per action", _DECISIONS: "one row per decision"}
# Kind of an array -> kinds of numpy dtypes, and what they are called.
_NUMBERS, _FLAGS, _IMAGES = "numbers", "flags", "images"
_KINDS = {
    _NUMBERS: ("fiu", "numbers"),
    "rewards": ("fiub", "numbers"),
    _DECISIONS: ("iu", "whole numbers"),
    _FLAGS: ("b", "true or false"),
    _IMAGES: ("u", "uint8"),
}


@dataclass
class Part:
    """An array of an episode as stored, and what it must look like.

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
    kind: str = _NUMBERS
    optional: bool = False

    @cached_property
    def values(self) -> np.ndarray:
        """Its content, read once."""
        return np.asarray(self.array[()])


@dataclass
class Fact:
    """A single value recorded with an episode.

    Attributes:
        name: its name in the file.
        stored: the value in the file; None if it is missing.
        kind: "text" (one line), "number" (whole, perhaps written as text) or "flag".
        optional: see `Part`.
        minimum: smallest permitted number.
    """

    name: str
    stored: Any
    kind: str
    optional: bool = False
    minimum: int | None = None

    @cached_property
    def value(self) -> Any:
        """The value as str, int or bool; None if it is missing or is none."""
        value = {"text": _as_text, "number": _as_number, "flag": _as_flag}[self.kind](self.stored)
        return None if self.minimum is not None and value is not None and value < self.minimum else value


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


def _as_flag(stored: Any) -> bool | None:
    return bool(stored) if isinstance(stored, (bool, np.bool_, int, np.integer)) and stored in (0, 1) else None


_EXPECTED = {"text": "one line of text", "number": "a whole number", "flag": "true or false"}


@dataclass
class StoredEpisode:
    """An episode as stored.

    Attributes:
        name: how the file calls it, with the file's name if there are several files.
        parts: its arrays by role; `actions` comes first.
        facts: single values by role.
        steps: recorded number of steps, if any.
        problems: what else is wrong with it.
    """

    name: str
    parts: dict[str, Part]
    facts: dict[str, Fact] = field(default_factory=dict)
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
        problems: what is already known to be wrong with the file.
        sizes: required sizes of named axes.

    Raises:
        DataError: there is no episode, or something is wrong.
    """
    every = [("", text) for text in problems]
    if not episodes and not every:
        every.append(("", "holds no episode"))
    usual = _usual_sizes(episodes) | {name: (size, "recorded") for name, size in (sizes or {}).items()}
    present = _first_with(episodes)
    for episode in episodes:
        every += [(episode.name, text) for text in _problems(episode, usual, present)]
    every += _memory_problem(episodes)
    if every:
        raise DataError(where, every)


def refuse(where: str | Path, problems: Sequence[str]) -> None:
    """Raise a DataError with these problems of a file; nothing if there are none."""
    if problems:
        raise DataError(where, [("", text) for text in problems])


class DataError(ConfigError):
    """What is wrong with a file; the message lists the first problems and counts the others.

    Attributes:
        where: the file.
        every: all problems: the episode's name ("" for the file as a whole) and what is wrong.
    """

    def __init__(self, where: str | Path, every: Sequence[tuple[str, str]]):
        self.where, self.every = str(where), list(every)
        texts = [f"{name}: {text}" if name else text for name, text in every]
        more = len(texts) - REPORTED
        listed = [*texts[:REPORTED], *([f"and {more} more problem" + "s" * (more > 1)] if more > 0 else [])]
        super().__init__([Problem(None, "invalid_file", f"{where}: {text}") for text in listed])


def camera_problems(names: Any, where: str) -> list[str]:
    """What is wrong with a list of camera names, which are parts of the names of arrays and files."""
    if not isinstance(names, (list, tuple)) or not names:
        return [f"{where}: cameras is {shortened(names)}; expected a list of names"]
    problems = [
        f"{where}: {shortened(name)} is no name of a camera; expected a word without slashes and line breaks"
        for name in names
        if _as_text(name) is None or isinstance(name, bytes) or "/" in name or "\\" in name
    ]
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    return problems + [f"{where}: camera {name} is named twice" for name in twice]


def _usual_sizes(episodes: Sequence[StoredEpisode]) -> dict[str, tuple[int, str]]:
    """Axis -> (most frequent size, where it comes from), for axes that are the same in all episodes."""
    counts: dict[str, Counter[int]] = {}
    first: dict[tuple[str, int], str] = {}
    for episode in episodes:
        for part in episode.parts.values():
            for axis, size in zip(part.axes, _shape(part.array, len(part.axes)) or ()):
                if isinstance(axis, str) and axis not in _REASONS:
                    counts.setdefault(axis, Counter())[size] += 1
                    first.setdefault((axis, size), episode.name)
    usual = {axis: count.most_common(1)[0][0] for axis, count in counts.items()}
    return {axis: (size, f"as in {first[axis, size]}") for axis, size in usual.items()}


def _shape(array: Any, rank: int) -> tuple[int, ...] | None:
    """The shape of an array of that rank; None for anything else."""
    shape = getattr(array, "shape", None)
    return shape if isinstance(shape, tuple) and len(shape) == rank else None


def _first_with(episodes: Sequence[StoredEpisode]) -> dict[str, str]:
    """Role of each optional array or value -> first episode that has it."""
    present: dict[str, str] = {}
    for episode in episodes:
        for role, part in episode.parts.items():
            if part.array is not None:
                present.setdefault(role, episode.name)
        for role, fact in episode.facts.items():
            if fact.stored is not None:
                present.setdefault(role, episode.name)
    return present


def _problems(
    episode: StoredEpisode, usual: Mapping[str, tuple[int, str]], present: Mapping[str, str]
) -> Iterator[str]:
    yield from episode.problems
    sizes = {} if episode.steps is None else {_STEPS: episode.steps}
    for role, part in episode.parts.items():
        if part.array is not None:
            problem = _shape_problem(part, sizes, usual) or _value_problem(part, sizes)
            if problem:
                yield f"{part.name} {problem}"
        elif not part.optional or role in present:
            yield _missing(part, role, episode.name, present)
    for role, fact in episode.facts.items():
        if fact.stored is not None:
            if fact.value is None:
                least = "" if fact.minimum is None else f" of at least {fact.minimum}"
                yield f"{fact.name} is {shortened(fact.stored)}; expected {_EXPECTED[fact.kind]}{least}"
        elif not fact.optional or role in present:
            yield _missing(fact, role, episode.name, present)


def _missing(missing: Part | Fact, role: str, episode: str, present: Mapping[str, str]) -> str:
    other = present.get(role, episode)
    if missing.optional:
        return f"{missing.name} is missing; {other} has it (optional: record it in all episodes or in none)"
    return f"{missing.name} is missing" + (f"; {other} has it" if other != episode else " (every episode needs it)")


def shortened(value: Any) -> str:
    """A value from a file in a message."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _shape_problem(part: Part, sizes: dict[str, int], usual: Mapping[str, tuple[int, str]]) -> str | None:
    """What is wrong with shape and dtype; an episode's sizes that are still open are taken from this part."""
    shape, dtype = getattr(part.array, "shape", None), getattr(part.array, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return "is not an array"
    known = {axis: size for axis, (size, _) in usual.items()} | sizes
    wanted = [known.get(axis, axis) if isinstance(axis, str) else axis for axis in part.axes]
    text = ", ".join("any" if size is None else str(size) for size in wanted)
    if len(shape) != len(part.axes):
        return f"has the shape {list(shape)}; expected [{text}]"
    if 0 in shape:
        return f"is empty: its shape is {list(shape)}"
    for axis, size, other in zip(part.axes, shape, wanted):
        if isinstance(other, int) and size != other:
            reason = _REASONS.get(str(axis)) or usual.get(str(axis), (0, ""))[1]
            return f"has the shape {list(shape)}; expected [{text}]" + (f", {reason}" if reason else "")
    kinds, words = _KINDS[part.kind]
    if dtype.kind not in kinds or (part.kind == _IMAGES and dtype != np.uint8):
        return f"holds {'text' if dtype.kind in 'OSU' else dtype}; expected {words}"
    sizes |= {axis: size for axis, size in zip(part.axes, shape) if isinstance(axis, str) and axis in _REASONS}
    return None


def too_large(array: Any) -> str | None:
    """What is wrong with the size of an array of numbers or names, which a small file can declare; None if nothing."""
    size = math.prod(array.shape) * array.dtype.itemsize
    return None if size <= LARGEST_ARRAY else f"would take {_gib(size)}; at most 2 GiB are read"


def _memory_problem(episodes: Sequence[StoredEpisode]) -> Iterator[tuple[str, str]]:
    """Images that do not fit into memory, where all of them are kept; a small file can declare any number of them."""
    images = [
        (math.prod(part.array.shape), episode.name, part.name, part.array.shape)
        for episode in episodes
        for part in episode.parts.values()
        if part.kind == _IMAGES and isinstance(getattr(part.array, "shape", None), tuple)
    ]
    total, memory = sum(size for size, *_ in images), _memory_bytes()
    if total > memory:
        _, episode, largest, shape = max(images)
        text = f"{largest} has the shape {list(shape)}; the images of all episodes would take {_gib(total)}"
        yield episode, f"{text}, and this machine has {_gib(memory)} of memory"


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _value_problem(part: Part, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with the values of an array of the right shape and dtype."""
    if part.kind in (_IMAGES, _FLAGS):
        return None
    if too_large(part.array):
        return too_large(part.array)
    try:
        values = part.values
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        return f"cannot be read ({error})"
    if part.kind == _DECISIONS:
        inside = values[0] == 0 and (np.diff(values) > 0).all() and values[-1] < sizes.get(_STEPS, np.inf)
        return (
            None if inside else f"is {shortened(values.tolist())}; expected increasing steps of the episode from 0 on"
        )
    if np.abs(values).max() <= _LARGEST:  # false for NaN, too
        return None
    rows = np.flatnonzero(~(np.abs(values.reshape(len(values), -1)) <= _LARGEST).all(axis=1))
    return f"holds NaN, infinity or a number too large for float32 in row {rows[0]}"

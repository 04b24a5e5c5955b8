"""Episodes of a dataset that `--episodes` and `--tasks` select."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from rlvla.data.options import ReadOptions
from rlvla.data.validation import refuse, shortened
from rlvla.utils.errors import ConfigError

T = TypeVar("T")


def parsed_episodes(entries: Sequence[str]) -> set[int] | None:
    """The numbers of `--episodes`; None: all.

    Raises:
        ConfigError: an entry is neither a number nor a range.
    """
    numbers: set[int] = set()
    for entry in entries:
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", entry)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            text = f"--episodes {entry}: write a number or a range, e.g. 3 or 10-19"
            raise ConfigError.of("episodes", "invalid_value", text)
        numbers.update(range(first, last + 1))
    return numbers or None


def episodes_by_number(numbered: Mapping[int, T], options: ReadOptions, where: str | Path) -> list[T]:
    """The episodes of `--episodes`, of a mapping from their numbers; all by default.

    Raises:
        DataError: the dataset `where` lacks one.
        ConfigError: as `parsed_episodes`.
    """
    chosen = parsed_episodes(options.episodes)
    if chosen is None:
        return list(numbered.values())
    if missing := sorted(chosen - set(numbered)):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        listed = ", ".join(map(str, missing[:3])) + more
        held = f"{len(numbered)} episodes, {min(numbered)} to {max(numbered)}" if numbered else "none"
        refuse(where, [f"has no episode {listed} (--episodes); it has {held}"])
    return [episode for number, episode in numbered.items() if number in chosen]


def episodes_of_tasks(instructions: Sequence[str | None], options: ReadOptions, where: str | Path) -> list[int]:
    """Positions of the episodes whose instruction matches one of `--tasks`, in any case; all by default.

    Raises:
        DataError: no episode of the dataset `where` has such an instruction.
    """
    patterns = [pattern.lower() for pattern in options.tasks]
    matching = [
        position
        for position, text in enumerate(instructions)
        if not patterns or any(fnmatchcase(str(text).lower(), pattern) for pattern in patterns)
    ]
    if patterns and not matching:
        held = sorted({str(text) for text in instructions})
        listed = "; ".join(map(shortened, held[:5])) + ("; ..." if len(held) > 5 else "")
        refuse(where, [f"has no episode of --tasks {' '.join(map(shortened, options.tasks))}; it has {listed}"])
    return matching

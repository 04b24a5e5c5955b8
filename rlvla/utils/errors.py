"""Errors for the user: the problem and its remedy."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

_Result = TypeVar("_Result")
_LONG_WORD = re.compile(r"(\S{100})\S{381,}(\S{20})")


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration.

    Programs and tests rely on `flag` and `reason`; the text is for the user and may be reworded.

    Attributes:
        flag: the flag to change, without dashes; None if no single flag is at fault.
        reason: the kind of mistake, e.g. "out_of_range", "not_divisible", "no_effect" (nothing reads the flag),
            "needs_flag" (another one is missing), "contradiction" (of two flags), "mismatch" (with a checkpoint, a
            suite, a dataset), "changed" (since the run being resumed was started), "missing_file", "invalid_file",
            "folder_in_use", "not_writable", "unknown_name", "duplicate", "too_few", "too_large" (for the memory),
            "unavailable" (on this machine); "" if none is given.
        text: a sentence that names the value and the remedy; also `str()` of the problem. Words of more than 500
            characters, such as names in a file, are shortened.
    """

    flag: str | None
    reason: str
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _LONG_WORD.sub(r"\1...\2", self.text))

    def __str__(self) -> str:
        return self.text

    def __contains__(self, part: str) -> bool:
        """Whether the text contains `part`."""
        return part in self.text

    def of_flag(self, flag: str, value: object = None) -> Problem:
        """The same problem, attributed to `flag`; its text starts with the flag and its value."""
        start = f"--{flag}" if value is None else f"--{flag} {value}"
        return Problem(flag, self.reason, f"{start}: {self.text}")

    def prefixed(self, prefix: str) -> Problem:
        """The same problem with `prefix` before its text."""
        return Problem(self.flag, self.reason, f"{prefix}{self.text}")


@dataclass(frozen=True)
class ChangedSetting(Problem):
    """A flag that differs from the run to resume; several are shown as one table.

    Attributes:
        run: folder of the run.
        there: the value with which it was started.
        now: the value of the flag.
    """

    run: str
    there: str
    now: str


def as_problems(problems: Iterable[str | Problem]) -> list[Problem]:
    """The problems; a plain string becomes one without flag and reason."""
    return [p if isinstance(p, Problem) else Problem(None, "", p) for p in problems]


class ConfigError(ValueError):
    """One or more mistakes in a configuration, all reported at once.

    Args:
        problems: one or several; a plain string is a problem without flag and reason.
        one_rank: raised on this rank alone (a worker that does not start here); by default every rank is assumed to
            raise the same error, and only one prints it.

    Attributes:
        problems: list of `Problem`.
    """

    def __init__(self, problems: str | Problem | Iterable[str | Problem], *, one_rank: bool = False):
        self.problems = as_problems([problems] if isinstance(problems, (str, Problem)) else problems)
        self.one_rank = one_rank
        super().__init__("\n".join(problem.text for problem in self.problems))

    @classmethod
    def of(cls, flag: str | None, reason: str, text: str) -> ConfigError:
        """The error of a single `Problem`."""
        return cls(Problem(flag, reason, text))


def collected(problems: list[Problem], read: Callable[[], _Result]) -> _Result | None:
    """The result of `read`; None after a ConfigError, whose problems are appended to `problems`."""
    try:
        return read()
    except ConfigError as error:
        problems += error.problems
        return None


class RunEnded(RuntimeError):
    """The run cannot or should not go on; the message, shown without a traceback, gives the reason and a remedy.

    Attributes:
        one_rank: it may be raised on this rank alone, which then prints it; if False, every rank raises it at the same
            point, and only one prints it.
    """

    one_rank = True


class TrainingHalted(RunEnded):
    """Further training would be wasted; raised on every rank at the same point."""

    one_rank = False


class SaveError(RunEnded):
    """A checkpoint or policy could not be written; raised on every rank at the same point."""

    one_rank = False


class MissingExtraError(ImportError):
    """An optional dependency is not installed; the message names the extra that provides it."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, or raise `MissingExtraError` naming the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f'{module} is not usable here ({error}). Install it with: pip install -c constraints.txt "rlvla[{extra}]"'
        ) from error

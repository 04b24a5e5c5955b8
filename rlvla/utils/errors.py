"""The errors a person is meant to read: what is wrong, and what to do about it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType


class ConfigError(ValueError):
    """One or more mistakes in a configuration, all reported at once.

    Args:
        problems: one sentence per mistake; each names the value and the remedy.
        one_rank: only this process found it (a worker that does not start here); otherwise every rank has found the
            same, and one of them tells.
    """

    def __init__(self, problems: str | Iterable[str], *, one_rank: bool = False):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.one_rank = one_rank
        super().__init__("\n".join(self.problems))


class RunEnded(RuntimeError):
    """The run cannot or should not go on; the message, shown without a traceback, says why and what to try.

    Attributes:
        one_rank: perhaps this process alone has found it, and tells by itself; otherwise every rank raises it at the
            same point, and one of them tells.
    """

    one_rank = True


class TrainingHalted(RunEnded):
    """Going on would be a waste; raised on every rank at the same point."""

    one_rank = False


class MissingExtraError(ImportError):
    """An optional dependency that is not installed; the message names the extra that brings it."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, or raise `MissingExtraError` naming the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f'{module} is not usable here ({error}). Install it with: pip install -c constraints.txt "rlvla[{extra}]"'
        ) from error

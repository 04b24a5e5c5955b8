"""Expectations of the contract tests: what does not hold is reported all at once, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlvla.envs.base import TaskSpec
from rlvla.envs.workers.answer_checks import BadAnswerError


@contextmanager
def expectations(of: str) -> Iterator[Callable[[bool, str], None]]:
    """Collect expectations; AssertionError with all that do not hold, and with the error that ended the checks, if any.

    Args:
        of: what they are about, e.g. "the result of step_chunk".

    Yields:
        `expect(holds, text)`; the text says what is expected, and what is there instead.
    """
    unmet: list[str] = []

    def expect(holds: bool, text: str) -> None:
        if not holds:
            unmet.append(text)

    try:
        yield expect
    except Exception as error:
        if not unmet:
            raise
        unmet.append(f"after which the checks ended: {type(error).__name__}: {error}")
    if unmet:
        raise AssertionError("\n  - ".join((f"{of}:", *unmet)))


def problems_of(check: Callable[..., None], *args: Any, **kw: Any) -> list[str]:
    """The problems that a method of `AnswerChecker` finds in an answer."""
    try:
        check(*args, **kw)
    except BadAnswerError as error:
        return error.problems
    return []


def differing_fields(task: TaskSpec, listed: TaskSpec) -> list[str]:
    """The attributes in which the task of an environment differs from the one that its suite lists."""
    pairs = {name: (value, getattr(listed, name)) for name, value in vars(task).items()}
    return [
        f"{name} is {mine!r}, but the suite lists {theirs!r}"
        for name, (mine, theirs) in pairs.items()
        if mine != theirs
    ]


@contextmanager
def raises(kind: type[Exception], what: str, naming: Sequence[str] = ()) -> Iterator[None]:
    """Expect an error: AssertionError unless `what` raises `kind` with a message that names all of `naming`."""
    try:
        yield
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"{what} must raise {kind.__name__}, but nothing was raised")
    if lost := [name for name in naming if name not in message]:
        raise AssertionError(f"{what}: the error must name {', '.join(lost)}, but says: {message}")

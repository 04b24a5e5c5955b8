"""A user-defined reward function, given as FILE.py:FUNCTION."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvla.options import arg
from rlvla.rewards.background import BackgroundJudge, BatchOptions, SampleReward, steps_checked
from rlvla.rewards.base import register_reward
from rlvla.utils.errors import ConfigError, Problem, RunEnded
from rlvla.utils.modules import load_from_file, user_traceback

if TYPE_CHECKING:
    from rlvla.experience import Sample


class RewardFunctionError(RunEnded):
    """The user's function raised, or returned invalid rewards."""


def load_function(spec: str) -> Callable[..., Any]:
    """The function of `file.py:function`; ConfigError as for `load_from_file`."""
    return load_from_file(spec, "reward_fn")


def parse_kwargs(values: Sequence[str]) -> dict[str, Any]:
    """`["scale=2", "mode=fast"]` or `['{"scale": 2, "mode": "fast"}']` -> `{"scale": 2, "mode": "fast"}`.

    Raises:
        ConfigError: invalid JSON, values without `=`, names that are not identifiers, or a name given twice.
    """
    flag = "reward_fn_kwargs"
    pairs: list[tuple[str, Any]] = []
    if len(values) == 1 and values[0].lstrip().startswith("{"):
        try:
            pairs = list(json.loads(values[0], object_pairs_hook=_without_duplicates).items())
        except (ValueError, RecursionError) as error:
            raise ConfigError.of(flag, "malformed", f"--{flag} {values[0][:80]}: not valid JSON ({error})") from None
    else:
        for value in values:
            name, equals, text = value.partition("=")
            pairs.append((name, _json_or_text(text)) if equals else (f"{value} (no =)", None))
    problems, kwargs = [], {}
    for name, value in pairs:
        if not name.isidentifier():
            text = f"--{flag} {name}: write KEY=VALUE, where KEY is an argument of your function"
            problems.append(Problem(flag, "malformed", text))
        elif name in kwargs:
            problems.append(Problem(flag, "duplicate", f"--{flag}: {name} is given twice"))
        kwargs[name] = value
    if problems:
        raise ConfigError(problems)
    return kwargs


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name is given twice")
    return dict(pairs)


@dataclass(frozen=True)
class FunctionOptions(BatchOptions):
    """The function and its arguments."""

    reward_fn: str | None = arg(
        None,
        "your function, called with a list of finished episodes (default: none)",
        metavar="FILE.py:FUNCTION",
    )
    reward_fn_kwargs: tuple[str, ...] = arg(
        (),
        "keyword arguments of your function: KEY=VALUE pairs (values as JSON, or else text) or one JSON object",
        metavar="KEY=VALUE",
    )


@register_reward("reward_fn", options=FunctionOptions)
class FunctionSource:
    """Calls `--reward_fn` with lists of finished episodes (`Sample`) in background threads.

    The function returns for each episode a number (given at the last step) or one number per executed step; with
    further numbers to be logged, (reward, {name: number}).
    """

    def __init__(self, options: FunctionOptions):
        if options.reward_fn is None:
            raise ConfigError("--reward reward_fn needs --reward_fn FILE.py:FUNCTION")
        self._spec = options.reward_fn
        self._function = load_function(options.reward_fn)
        self._kwargs = parse_kwargs(options.reward_fn_kwargs)
        self._check_arguments()
        self._names: set[str] = set()  # of the numbers returned for logging
        self._judge = BackgroundJudge(self._call, options.reward_fn_batch_size, options.reward_fn_workers)

    def submit(self, sample: Sample) -> None:
        """Queue a finished episode."""
        self._judge.submit(sample)

    def collect(self) -> list[SampleReward]:
        """Rewards of the queued episodes; RewardFunctionError with the user's traceback if the function raised."""
        return self._judge.collect()

    def close(self) -> None:
        """Shut down the threads."""
        self._judge.close()

    def _check_arguments(self) -> None:
        """ConfigError if the function does not take the keyword arguments, or needs others."""
        try:
            inspect.signature(self._function).bind([], **self._kwargs)
        except TypeError as error:
            given = ", ".join(self._kwargs) or "none"
            text = f"--reward_fn {self._spec} cannot be called with the list of episodes and {given} of "
            raise ConfigError.of("reward_fn_kwargs", "mismatch", f"{text}--reward_fn_kwargs: {error}") from None
        except ValueError:
            pass  # a callable without a signature

    def _call(self, samples: list[Sample]) -> list[SampleReward]:
        path = Path(self._spec.rpartition(":")[0])
        try:
            answer = self._function(samples, **self._kwargs)
        except Exception as error:
            raise RewardFunctionError(
                f"--reward_fn {self._spec} raised {type(error).__name__}:\n{user_traceback(error, path)}"
            ) from error
        try:
            return steps_checked(answer, samples, f"--reward_fn {self._spec}", self._names)
        except ValueError as error:
            raise RewardFunctionError(str(error)) from None

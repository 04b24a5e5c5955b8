"""A user-defined reward function, given as FILE.py:FUNCTION."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvla.rewards.background import BackgroundJudge, SampleReward, steps_checked
from rlvla.rewards.base import register_reward
from rlvla.utils.errors import ConfigError, RunEnded
from rlvla.utils.modules import load_file

if TYPE_CHECKING:
    from rlvla.experience import Sample
    from rlvla.rewards.config import RewardConfig


class RewardFunctionError(RunEnded):
    """The user's function raised, or returned invalid rewards."""


def load_function(spec: str) -> Callable[..., Any]:
    """The function of `file.py:function`.

    Raises:
        ConfigError: malformed spec, missing file or function, or an error while executing the file.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier():
        raise ConfigError(f"--reward_fn {spec}: write FILE.py:FUNCTION")
    if not path.is_file():
        raise ConfigError(f"--reward_fn {spec}: {path} does not exist")
    if path.suffix != ".py":
        raise ConfigError(f"--reward_fn {spec}: {path} is not a Python file")
    try:
        module = load_file(path)
    except Exception as error:
        raise ConfigError(f"--reward_fn {spec}: the file cannot be executed:\n{user_traceback(error, path)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "none"
        raise ConfigError(f"--reward_fn {spec}: {path} has no function {name}; it has: {there}")
    return function


def user_traceback(error: BaseException, path: Path) -> str:
    """The indented traceback, starting at the first frame in the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    file = path.resolve()
    first = next((i for i, frame in enumerate(frames) if Path(frame.filename).resolve() == file), 0)
    lines = traceback.format_list(frames[first:]) + traceback.format_exception_only(error)
    return "".join(f"      {line}\n" for line in "".join(lines).splitlines()).rstrip("\n")


@register_reward("reward_fn")
class FunctionSource:
    """Calls `--reward_fn` with lists of finished episodes (`Sample`) in background threads.

    The function returns for each episode a number (given at the last step) or one number per executed step.
    """

    def __init__(self, config: RewardConfig):
        if config.reward_fn is None:
            raise ConfigError("--reward reward_fn needs --reward_fn FILE.py:FUNCTION")
        self._spec = config.reward_fn
        self._function = load_function(config.reward_fn)
        self._judge = BackgroundJudge(self._call, config.reward_fn_batch_size, config.reward_fn_workers)

    def submit(self, sample: Sample) -> None:
        """Queue a finished episode."""
        self._judge.submit(sample)

    def collect(self) -> list[SampleReward]:
        """Rewards of the queued episodes; RewardFunctionError with the user's traceback if the function raised."""
        return self._judge.collect()

    def close(self) -> None:
        """Shut down the threads."""
        self._judge.close()

    def _call(self, samples: list[Sample]) -> list[SampleReward]:
        path = Path(self._spec.rpartition(":")[0])
        try:
            answer = self._function(samples)
        except Exception as error:
            raise RewardFunctionError(
                f"--reward_fn {self._spec} raised {type(error).__name__}:\n{user_traceback(error, path)}"
            ) from error
        try:
            return steps_checked(answer, samples, f"--reward_fn {self._spec}")
        except ValueError as error:
            raise RewardFunctionError(str(error)) from None

"""What a reward source is, and how sources are named on the command line.

A source lives as long as the run. For every episode it creates an `EpisodeReward`, which sees each executed step,
is asked for what came late when the episode is over, and is released. A `SampleSource` looks at finished episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:  # the shape of what is seen, not the rooms it comes from
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.experience import Sample
    from rlvla.rewards.config import RewardConfig


@dataclass(frozen=True)
class StepInfo:
    """What a source is told of one executed environment step, beside the observation and the events.

    Attributes:
        success: the success predicate after the step.
        terminated: the environment ended the episode with this step, by itself.
        truncated: the environment ended the episode with this step, by the step limit.
    """

    success: bool
    terminated: bool
    truncated: bool


@dataclass(frozen=True)
class EpisodeStart:
    """What is known when an episode begins.

    Attributes:
        observation: the first one; None where a source is tried out without a simulator.
        init_state_id: the initial state.
        seed: of the episode.
    """

    observation: Observation | None = None
    init_state_id: int = 0
    seed: int = 0


class EpisodeReward(Protocol):
    """One source of reward during one episode.

    It may also have `progress` (float in [0, 1], how near the goal is; None while unknown) for dynamic truncation,
    `failed` (bool), which ends the episode, and `end(*, terminated, truncated)`, which is called once, after the last
    step and before `finish`, whoever ended the episode: the environment, a failed source, or dynamic truncation.
    """

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> float | None:
        """The reward of one executed step, or None if it is not known yet.

        Args:
            observation: what the policy sees next; None inside a chunk, where nothing is rendered.
            events: names of the propositions that hold after the step.
            info: success and end of the episode.
        """
        ...

    def finish(self) -> dict[str, Any]:
        """Called once, when the episode's rewards are needed; may wait for what is outstanding.

        Returns:
            `rewards`: one float per executed step, where `step` returned None. Every other entry is a number
            that is logged as `reward/<source>_<entry>`, averaged over episodes.
        """
        ...

    def release(self) -> None:
        """The episode is over; free what it held."""
        ...


@runtime_checkable
class RewardSource(Protocol):
    """A configured source; one per run and rank.

    It may also have `start()` (before the first episode), `close()` (after the last), `metrics()` (numbers of the
    iteration, added up over ranks) and `problems(tasks)` (what is wrong with its settings for these tasks).
    """

    def create(self, task: TaskSpec, episode: EpisodeStart) -> EpisodeReward:
        """The source during one episode."""
        ...


@runtime_checkable
class SampleSource(Protocol):
    """A source that judges finished episodes; it may have the same optional methods as a `RewardSource`."""

    def submit(self, sample: Sample) -> None:
        """An episode is finished; must not block."""
        ...

    def collect(self) -> list[float | np.ndarray]:
        """For the episodes submitted since the last call, in their order; may wait.

        Each is the reward of the episode (paid at its last step) or an array with one entry per executed step.
        """
        ...


SourceFactory = Callable[["RewardConfig"], Any]
_SOURCES: dict[str, SourceFactory] = {}


def register_reward(name: str) -> Callable[[SourceFactory], SourceFactory]:
    """Decorator: make a source known under `name`: a callable that takes the reward settings and returns it."""

    def register(factory: SourceFactory) -> SourceFactory:
        _SOURCES[name] = factory
        return factory

    return register


def reward_names() -> list[str]:
    """The registered sources, sorted."""
    return sorted(_SOURCES)


def make_source(name: str, config: RewardConfig) -> Any:
    """The registered source of that name."""
    return _SOURCES[name](config)


def parse_rewards(specs: Sequence[str]) -> dict[str, float]:
    """`["success:1.0"]` -> `{"success": 1.0}`.

    Raises:
        ConfigError: every unknown source, malformed or non-finite weight, and repetition at once; or no source at all.
    """
    weights: dict[str, float] = {}
    problems = [] if specs else ["--reward needs at least one source, e.g. success:1.0"]
    for spec in specs:
        name, _, weight = spec.partition(":")
        if name not in _SOURCES:
            problems.append(f"--reward {spec}: unknown source '{name}'; known: {', '.join(reward_names())}")
            continue
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            value = float("nan")
        if not np.isfinite(value):
            problems.append(f"--reward {spec}: the weight must be a finite number, e.g. {name}:1.0")
        elif name in weights:
            problems.append(f"--reward {spec}: '{name}' is given twice")
        weights[name] = value
    if problems:
        raise ConfigError(problems)
    return weights


def numbers_only(content: Mapping[str, Any]) -> dict[str, float]:
    """The entries of `finish` that are logged."""
    return {name: float(value) for name, value in content.items() if name != "rewards"}

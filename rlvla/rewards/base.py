"""What a reward source is, and how sources add up.

A source lives once per episode: it is created for it, sees every executed step, may add up at the end, and is released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:  # the shape of what is seen, not the room it comes from
    from rlvla.envs.base import ChunkResult, TaskSpec


@dataclass(frozen=True)
class StepInfo:
    """What a source sees of one executed environment step.

    Attributes:
        success: the success predicate after the step.
        terminated: the episode ended with this step, by itself.
        truncated: the episode ended with this step, by the step limit.
        events: names of the propositions that hold after the step.
    """

    success: bool
    terminated: bool
    truncated: bool
    events: frozenset[str]


class RewardSource(Protocol):
    """One source of reward during one episode."""

    def step(self, info: StepInfo) -> float:
        """The reward of one executed step."""
        ...

    def release(self) -> None:
        """The episode is over."""
        ...


_SOURCES: dict[str, Callable[[TaskSpec], RewardSource]] = {}


def register_reward(name: str) -> Callable[[Callable[[TaskSpec], RewardSource]], Callable[[TaskSpec], RewardSource]]:
    """Decorator: make a source (a callable that takes the task of an episode) known under `name`."""

    def register(factory: Callable[[TaskSpec], RewardSource]) -> Callable[[TaskSpec], RewardSource]:
        _SOURCES[name] = factory
        return factory

    return register


def reward_names() -> list[str]:
    """The registered sources, sorted."""
    return sorted(_SOURCES)


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


class EpisodeRewards:
    """The weighted sources of one episode.

    Args:
        weights: source name -> weight, as from `parse_rewards`.
        task: the episode's task.
    """

    def __init__(self, weights: dict[str, float], task: TaskSpec):
        self._weights = weights
        self._sources = {name: _SOURCES[name](task) for name in weights}

    def score_chunk(self, result: ChunkResult) -> dict[str, np.ndarray]:
        """Weighted reward of each source for a chunk, name -> [A] float32; zero at steps not executed."""
        rewards = {name: np.zeros(len(result.rewards), dtype=np.float32) for name in self._sources}
        for step in range(result.steps_executed):
            last = step == result.steps_executed - 1
            info = StepInfo(
                success=bool(result.successes[step]),
                terminated=last and result.terminated,
                truncated=last and result.truncated,
                events=result.events[step] if result.events else frozenset(),
            )
            for name, source in self._sources.items():
                rewards[name][step] = self._weights[name] * source.step(info)
        return rewards

    def release(self) -> None:
        """Release every source."""
        for source in self._sources.values():
            source.release()

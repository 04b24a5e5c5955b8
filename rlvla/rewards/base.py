"""Interfaces of reward sources, their registry, and the parser of `--reward`.

A source lives as long as the run. For each episode it creates an `EpisodeReward`, which is called after every executed
step, asked for late rewards when the episode is over, and released. A `SampleSource` scores finished episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from rlvla.utils.errors import ConfigError, Problem

if TYPE_CHECKING:  # types only: rewards do not depend on these packages at runtime
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.experience import Sample
    from rlvla.rewards.config import RewardConfig


@dataclass(frozen=True)
class StepInfo:
    """Outcome of an executed environment step, in addition to the observation and the events.

    Attributes:
        success: success predicate after the step.
        terminated: the environment terminated the episode with this step.
        truncated: the step limit was reached with this step.
        reward: the simulator's native reward of the step.
        components: further terms of the environment, see `TaskSpec.reward_components`.
    """

    success: bool
    terminated: bool
    truncated: bool
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EpisodeStart:
    """Information available at the start of an episode.

    Attributes:
        observation: the first observation; None if a source is used without a simulator.
        init_state_id: id of the initial state.
        seed: seed of the episode.
    """

    observation: Observation | None = None
    init_state_id: int = 0
    seed: int = 0


class EpisodeReward(Protocol):
    """A reward source during one episode.

    Optional members: `progress` (float in [0, 1], 1 at the goal; None while unknown) for dynamic truncation; instead of
    it, if progress becomes known later, `late_progress()`, which returns what was learned since the last call as pairs
    (number of executed steps, progress then), in order of the steps; `failed` (bool), which ends the episode; and
    `end(*, terminated, truncated)`, which is called once after the last step and before `finish`, whether the
    environment, a failed source or dynamic truncation ended the episode. `look(result)` is called with
    each `ChunkResult` before its steps are scored; the episode waits for the futures it returns, while others are
    played. Where `look` exists, `query_final_frame(result)` may, too: it is called before the steps are scored if a
    success detector ended the episode with the chunk, and returns futures in the same way. `scores()`, called after
    `finish`, returns what was judged along the way as triples (number of executed steps, action score, progress then),
    both in [0, 1] or NaN, in order of the steps; a replay buffer may draw by it.
    """

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> float | None:
        """Return the reward of an executed step, or None if it is computed later.

        Args:
            observation: the next observation; None inside a chunk, where nothing is rendered.
            events: propositions that hold after the step.
            info: outcome of the step.
        """
        ...

    def finish(self) -> dict[str, Any]:
        """Called once, when the rewards of the episode are needed; may block.

        Returns:
            `rewards`: one float per executed step, required if `step` returned None. All other entries are numbers that
            are logged as `reward/<source>_<entry>`, averaged over episodes.
        """
        ...

    def release(self) -> None:
        """The episode is over; free all resources."""
        ...


@runtime_checkable
class RewardSource(Protocol):
    """A configured source; one per run and rank.

    Optional methods: `start()` (before the first episode), `close()` (after the last), `metrics()` (metrics of the
    iteration, summed over ranks), `check(metrics)` (of all ranks; raises if training cannot continue),
    `problems(tasks)` (problems of its settings for these tasks) and `ends_episodes(tasks)` (whether an episode of these
    tasks may set `failed`; needed if it may, as `--success_every` is then refused). Optional attribute: `server`, an
    object with the same methods (other than the last two), a `key` and `shared(other)`; sources whose keys are equal
    share the first one.
    """

    def create(self, task: TaskSpec, episode: EpisodeStart) -> EpisodeReward:
        """Create the part of the source that follows one episode."""
        ...


@runtime_checkable
class SampleSource(Protocol):
    """A source that scores finished episodes; it may have the same optional methods as a `RewardSource`."""

    def submit(self, sample: Sample) -> None:
        """Queue a finished episode; must not block."""
        ...

    def collect(self) -> list[float | np.ndarray]:
        """Rewards of the episodes submitted since the last call, in order; may block.

        Each is either the reward of the episode (given at its last step) or an array with one entry per executed step.
        """
        ...


SourceFactory = Callable[..., Any]
_SOURCES: dict[str, SourceFactory] = {}
_OWN_FLAGS: dict[str, str] = {}  # source -> the flag that adds it, if not --reward
_KINDS: dict[str, Callable[[], Collection[str]]] = {}  # source -> names of its kinds


def register_reward(
    name: str, own_flag: str | None = None, kinds: Callable[[], Collection[str]] | None = None
) -> Callable[[SourceFactory], SourceFactory]:
    """Decorator that registers a source factory, called with the `RewardConfig`.

    Args:
        name: name of the source and of its reward component.
        own_flag: the flag that adds the source, if not `--reward`.
        kinds: names for `--reward NAME:KIND:WEIGHT`, each of which adds a component `NAME_KIND`; the factory is then
            called with the kind as second argument.
    """

    def register(factory: SourceFactory) -> SourceFactory:
        _SOURCES[name] = factory
        _OWN_FLAGS.pop(name, None)
        _KINDS.pop(name, None)
        if own_flag is not None:
            _OWN_FLAGS[name] = own_flag
        if kinds is not None:
            _KINDS[name] = kinds
        return factory

    return register


def reward_names() -> list[str]:
    """Names accepted by `--reward`, sorted."""
    return sorted(set(_SOURCES) - set(_OWN_FLAGS))


def source_of(component: str) -> tuple[str, str | None]:
    """The source of a component, and its kind if the component is one of several."""
    for name, kinds in _KINDS.items():
        prefix, _, kind = component.partition(f"{name}_")
        if not prefix and kind in kinds():
            return name, kind
    return component, None


def make_source(component: str, config: RewardConfig) -> Any:
    """Create the source of a component."""
    name, kind = source_of(component)
    return _SOURCES[name](config) if kind is None else _SOURCES[name](config, kind)


def component_of(spec: str) -> str:
    """`success:1.0` -> `success`, `vlm:grasp:0.1` -> `vlm_grasp`."""
    name, _, rest = spec.partition(":")
    kind = rest.partition(":")[0]
    return f"{name}_{kind}" if name in _KINDS and kind in _KINDS[name]() else name


def parse_rewards(specs: Sequence[str]) -> dict[str, float]:
    """`["success:1.0", "vlm:grasp:0.1"]` -> `{"success": 1.0, "vlm_grasp": 0.1}`.

    Raises:
        ConfigError: no source, or unknown sources, invalid weights and duplicates (all reported at once).
    """
    weights: dict[str, float] = {}
    problems: list[Problem] = []

    def report(reason: str, text: str) -> None:
        problems.append(Problem("reward", reason, text))

    if not specs:
        report("too_few", "--reward needs at least one source, e.g. success:1.0")
    for spec in specs:
        name, component = spec.partition(":")[0], component_of(spec)
        if name in _OWN_FLAGS:
            report("contradiction", f"--reward {spec}: this source is added by {_OWN_FLAGS[name]}")
            continue
        if name not in _SOURCES:
            report("unknown_name", f"--reward {spec}: unknown source '{name}'; known: {', '.join(reward_names())}")
            continue
        weight = spec[len(component) + 1 :]
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            value = float("nan")
            if name in _KINDS and component == name:
                known = ", ".join(_KINDS[name]())
                report("unknown_name", f"--reward {spec}: neither a weight nor a kind of {name}; known: {known}")
                continue
        if not np.isfinite(value):
            example = component.replace(f"{name}_", f"{name}:", 1)
            report("out_of_range", f"--reward {spec}: the weight must be a finite number, e.g. {example}:1.0")
        elif component in weights:
            report("duplicate", f"--reward {spec}: '{component}' is given twice")
        weights[component] = value
    for name in sorted(set(_KINDS) & set(weights)):
        if any(source_of(component) != (component, None) for component in weights if source_of(component)[0] == name):
            report("contradiction", f"--reward has {name} with and without a kind; write {name}:KIND:WEIGHT for each")
    if problems:
        raise ConfigError(problems)
    return weights


def numbers_only(content: Mapping[str, Any]) -> dict[str, float]:
    """The entries of `EpisodeReward.finish` that are logged."""
    return {name: float(value) for name, value in content.items() if name != "rewards"}


def scores_of_decisions(steps: Sequence[int] | np.ndarray, scores: Sequence[tuple[int, float, float]]) -> np.ndarray:
    """[S, 2] float32: for each decision the scores that were given first at its end or later, NaN if there are none.

    Args:
        steps: [S] environment steps of each decision.
        scores: as `EpisodeReward.scores`.
    """
    ends, given = np.cumsum(steps), np.array([after for after, *_ in scores], dtype=np.int64)
    values = np.array([*((action, progress) for _, action, progress in scores), (np.nan, np.nan)], np.float32)
    return values[np.searchsorted(given, ends)]


def scores_of_progress(known: Sequence[tuple[int, float]]) -> list[tuple[int, float, float]]:
    """`EpisodeReward.scores` of a judge of progress: an action is scored 1 where it has grown, 0 where it has shrunk.

    Args:
        known: (number of executed steps, progress then), from the start of the episode on.
    """
    return [
        (steps, 0.5 + 0.5 * ((progress > before) - (progress < before)), progress)
        for (_, before), (steps, progress) in zip(known, known[1:])
    ]

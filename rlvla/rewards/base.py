"""Interfaces of reward sources, their registry, and the parser of `--reward`.

A source lives as long as the run. For each episode it creates an `EpisodeReward`, which is called after every executed
step, asked for late rewards when the episode is over, and released. A `SampleSource` scores finished episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from rlvla.options import Condition, Registry
from rlvla.utils.errors import ConfigError, Problem

if TYPE_CHECKING:  # types only: rewards do not depend on these packages at runtime
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.experience import Sample


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
    """A reward source during one episode; a subclass needs to define `step` only.

    Optional members: `progress` (float in [0, 1], 1 at the goal; None while unknown) for dynamic truncation; instead of
    it, if progress becomes known later, `late_progress()`, which returns the measurements since the last call as pairs
    (number of executed steps, progress then), in order of the steps; `failed` (bool), which ends the episode; and
    `end(*, terminated, truncated)`, which is called once after the last step and before `finish`, whether the
    environment, a failed source or dynamic truncation ended the episode. `look(result)` is called with
    each `ChunkResult` before its steps are scored; the episode waits for the futures it returns, while others are
    played. Where `look` exists, `query_final_frame(result)` may, too: it is called before the steps are scored if a
    success detector ended the episode with the chunk, and returns futures in the same way. `scores()`, called after
    `finish`, returns triples (number of executed steps, action score, progress then), both in [0, 1] or NaN, in order
    of the steps; a replay buffer may draw by them.
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
        return {}

    def release(self) -> None:
        """The episode is over; free all resources."""
        return None


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


def _sources_in_use(flags: Mapping[str, Any]) -> set[str]:
    """Names in --reward, and sources that another flag adds."""
    added = {name for name, flag in _adding_flags().items() if flags.get(flag)}
    return added | {spec.partition(":")[0] for spec in flags.get("reward", ())}


def _missing_source(names: Sequence[str]) -> str:
    flags = [flag for name, flag in _adding_flags().items() if name in names]
    return f"there is no --{flags[0]}" if flags else f"there is no {' or '.join(names)} in --reward"


REWARDS: Registry[SourceFactory] = Registry(
    "reward",
    defaults={"own_flag": None, "kinds": None, "reads_images": True, "scores_decisions": False},
    selection=_sources_in_use,
    unused=_missing_source,
)


def used_by(*sources: str) -> Condition:
    """One of these sources is in use."""
    return Condition(
        lambda flags: bool(_sources_in_use(flags) & set(sources)),
        f"there is no {' or '.join(sources)} in --reward",
    )


def register_reward(
    name: str,
    own_flag: str | None = None,
    kinds: Callable[[], Collection[str]] | None = None,
    *,
    options: type | None = None,
    reads_images: bool = True,
    scores_decisions: bool = False,
) -> Callable[[SourceFactory], SourceFactory]:
    """Decorator that registers a factory of a reward source.

    Args:
        name: name of the source and of its reward component.
        own_flag: the flag, without dashes, that adds the source in place of `--reward`.
        kinds: names for `--reward NAME:KIND:WEIGHT`, each of which adds a component `NAME_KIND`; the factory is then
            called with the kind as second argument.
        options: frozen dataclass of `rlvla.options.arg` fields, which become flags; the factory is called with it.
            Without options it is called with the `RewardConfig`.
        reads_images: the source needs the images of observations; otherwise a run may leave them out.
        scores_decisions: its episodes have `EpisodeReward.scores`, for --replay_score_source.
    """
    attributes = {"own_flag": own_flag, "kinds": kinds, "reads_images": reads_images}
    return REWARDS.register(name, options=options, scores_decisions=scores_decisions, **attributes)


def _adding_flags() -> dict[str, str]:
    """Source -> the flag that adds it in place of `--reward`."""
    return {name: flag for name in REWARDS.names() if (flag := REWARDS.attribute(name, "own_flag"))}


def _kinds(name: str) -> Collection[str]:
    """Names of the kinds of a source; empty if it has none or is unknown."""
    kinds = REWARDS.attribute(name, "kinds") if name in REWARDS.names() else None
    return kinds() if kinds is not None else ()


def reward_names() -> list[str]:
    """Names accepted by `--reward`, sorted."""
    return sorted(set(REWARDS.names()) - set(_adding_flags()))


def source_of(component: str) -> tuple[str, str | None]:
    """The source of a component, and its kind if the component is one of several."""
    for name in REWARDS.names():
        prefix, _, kind = component.partition(f"{name}_")
        if not prefix and kind in _kinds(name):
            return name, kind
    return component, None


def reads_images(spec: str) -> bool:
    """Whether the source of a value of `--reward` needs images."""
    name = spec.partition(":")[0]
    return name not in REWARDS.names() or bool(REWARDS.attribute(name, "reads_images"))


def component_of(spec: str) -> str:
    """`success:1.0` -> `success`, `vlm:grasp:0.1` -> `vlm_grasp`."""
    name, _, rest = spec.partition(":")
    kind = rest.partition(":")[0]
    return f"{name}_{kind}" if kind in _kinds(name) else name


def parse_rewards(specs: Sequence[str]) -> dict[str, float]:
    """`["success:1.0", "vlm:grasp:0.1"]` -> `{"success": 1.0, "vlm_grasp": 0.1}`.

    Raises:
        ConfigError: no source, or unknown sources, invalid weights and duplicates (all reported at once).
    """
    weights: dict[str, float] = {}
    problems: list[Problem] = []
    adding_flags = _adding_flags()

    def report(reason: str, text: str) -> None:
        problems.append(Problem("reward", reason, text))

    if not specs:
        report("too_few", "--reward needs at least one source, e.g. success:1.0")
    for spec in specs:
        name, component = spec.partition(":")[0], component_of(spec)
        if name in adding_flags:
            report("contradiction", f"--reward {spec}: this source is added by --{adding_flags[name]}")
            continue
        if name not in REWARDS.names():
            report("unknown_name", f"--reward {spec}: unknown source '{name}'; known: {', '.join(reward_names())}")
            continue
        weight = spec[len(component) + 1 :]
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            value = float("nan")
            if component == name and (kinds := ", ".join(_kinds(name))):
                report("unknown_name", f"--reward {spec}: neither a weight nor a kind of {name}; known: {kinds}")
                continue
        if not np.isfinite(value):
            example = component.replace(f"{name}_", f"{name}:", 1)
            report("out_of_range", f"--reward {spec}: the weight must be a finite number, e.g. {example}:1.0")
        elif component in weights:
            report("duplicate", f"--reward {spec}: '{component}' is given twice")
        weights[component] = value
    for name in sorted(name for name in weights if _kinds(name)):
        if any(source_of(component) != (component, None) for component in weights if source_of(component)[0] == name):
            report("contradiction", f"--reward has {name} with and without a kind; write {name}:KIND:WEIGHT for each")
    if problems:
        raise ConfigError(problems)
    return weights


def scores_of_decisions(steps: Sequence[int] | np.ndarray, scores: Sequence[tuple[int, float, float]]) -> np.ndarray:
    """[S, 2] float32: for each decision the scores that were given first at its end or later, NaN if there are none.

    Args:
        steps: [S] environment steps of each decision.
        scores: as `EpisodeReward.scores`.
    """
    ends, scored_at = np.cumsum(steps), np.array([after for after, *_ in scores], dtype=np.int64)
    values = np.array([*((action, progress) for _, action, progress in scores), (np.nan, np.nan)], np.float32)
    return values[np.searchsorted(scored_at, ends)]


def scores_of_progress(measurements: Sequence[tuple[int, float]]) -> list[tuple[int, float, float]]:
    """`EpisodeReward.scores` from progress: an action scores 1 if progress grew, 0 if it shrank, else 0.5.

    Args:
        measurements: (number of executed steps, progress then), from the start of the episode on.
    """
    return [
        (steps, 0.5 + 0.5 * ((progress > before) - (progress < before)), progress)
        for (_, before), (steps, progress) in zip(measurements, measurements[1:])
    ]

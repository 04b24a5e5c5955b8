"""Reward sources added up by weight: what they pay for an episode, and what came late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.rewards.base import (
    EpisodeStart,
    RewardSource,
    SampleSource,
    StepInfo,
    make_source,
    numbers_only,
    parse_rewards,
)
from rlvla.rewards.config import RewardConfig
from rlvla.rewards.schedule import WeightSchedule, fraction_done, parse_schedules
from rlvla.rewards.truncation import ProgressWatch
from rlvla.utils.arguments import as_typed
from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlvla.envs.base import ChunkResult, TaskSpec
    from rlvla.experience import Sample

# First letters of a setting -> the sources that read it.
_USERS = {
    "reward_coef": ("success",),
    "success_reward": ("success",),
    "gamma_shaping": ("rm", "vlm"),
    "rm_model_": ("rm_model",),
    "rm_": ("rm",),
    "vlm_": ("vlm",),
    "reward_fn_": ("reward_fn", "remote"),
    "reward_fn": ("reward_fn",),
    "remote_rm_": ("remote",),
}


class RewardPlan:
    """The sources of a run with their weights.

    Args:
        weights: source name -> weight.
        config: settings of the sources.
        sources: source name -> source; default: made from the registry.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        config: RewardConfig | None = None,
        sources: Mapping[str, Any] | None = None,
    ):
        self.config = config or RewardConfig()
        self._weights = dict(weights)
        self.sources = {name: (sources or {}).get(name) or make_source(name, self.config) for name in weights}
        self._schedules: dict[str, WeightSchedule] = parse_schedules(self.config.reward_schedule, self._weights)
        self._fraction = 0.0

    @classmethod
    def from_config(cls, config: RewardConfig) -> RewardPlan:
        """The plan of the flags; ConfigError with every problem that needs no task."""
        problems: list[str] = []
        weights: dict[str, float] = {}
        try:
            weights = parse_rewards(config.reward)
        except ConfigError as error:
            problems += error.problems
        try:
            names = [spec.partition(":")[0] for spec in config.reward]
            parse_schedules(config.reward_schedule, names)
        except ConfigError as error:
            problems += error.problems
        sources = {}
        for name in weights:
            try:
                sources[name] = make_source(name, config)
            except ConfigError as error:
                problems += error.problems
        problems += _without_effect(config, weights)
        if config.dynamic_truncation and not {"rm", "vlm"} & set(weights):
            problems.append("--dynamic_truncation needs a source that sees progress: add rm or vlm to --reward")
        if problems:
            raise ConfigError(problems)
        return cls(weights, config, sources)

    def problems(self, tasks: Sequence[TaskSpec]) -> list[str]:
        """What is wrong with the sources for these tasks."""
        return [p for source in self.sources.values() if hasattr(source, "problems") for p in source.problems(tasks)]

    @property
    def names(self) -> list[str]:
        """Component names, in the order of the flags."""
        return list(self._weights)

    def weights(self) -> dict[str, float]:
        """The weights at this point of training."""
        factors = {name: schedule.at(self._fraction) for name, schedule in self._schedules.items()}
        return {name: weight * factors.get(name, 1.0) for name, weight in self._weights.items()}

    def start_iteration(self, index: int, total: int) -> None:
        """Iteration `index` (from 0) of `total` begins: schedules and curricula move on."""
        self._fraction = fraction_done(index, total)
        for source in self.sources.values():
            if hasattr(source, "start_iteration"):
                source.start_iteration(self._fraction)

    def start(self) -> None:
        """Before the first episode: connect, load. Raises what the sources raise."""
        for source in self.sources.values():
            if hasattr(source, "start"):
                source.start()

    def close(self) -> None:
        """After the last episode."""
        for source in self.sources.values():
            if hasattr(source, "close"):
                source.close()

    def begin(self, task: TaskSpec, start: EpisodeStart) -> EpisodeRewards:
        """The rewards of a new episode."""
        return EpisodeRewards(self.sources, self.weights(), task, start, self._watch())

    def _watch(self) -> ProgressWatch | None:
        config = self.config
        if not config.dynamic_truncation:
            return None
        return ProgressWatch(config.truncation_patience, config.truncation_min_gain)

    def submit(self, sample: Sample) -> None:
        """An episode is finished: sources that judge whole episodes may begin."""
        for source in self.sources.values():
            if isinstance(source, SampleSource):
                source.submit(sample)

    def collect(self, count: int) -> list[dict[str, Any]]:
        """Source name -> judgement for each of the `count` episodes submitted since the last call, in their order."""
        judged: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, source in self.sources.items():
            if isinstance(source, SampleSource):
                for entry, judgement in zip(judged, source.collect()):
                    entry[name] = judgement
        return judged

    def metrics(self) -> dict[str, float]:
        """Numbers of the sources since the last call, to be added up over ranks."""
        found: dict[str, float] = {}
        for source in self.sources.values():
            if hasattr(source, "metrics"):
                found |= source.metrics()
        return found

    def check(self, metrics: Mapping[str, float]) -> None:
        """Give every source a look at the numbers of all ranks; it raises where training cannot go on."""
        for source in self.sources.values():
            if hasattr(source, "check"):
                source.check(metrics)


def _without_effect(config: RewardConfig, weights: Mapping[str, float]) -> list[str]:
    """Settings of a source that is not asked for: accepted, they would be ignored."""
    found = []
    for field in fields(config):
        users = next((names for prefix, names in _USERS.items() if field.name.startswith(prefix)), ())
        if users and not set(users) & set(weights) and getattr(config, field.name) != field.default:
            found.append(
                f"--{field.name} has no effect: add {' or '.join(users)} to --reward, or leave it out (against a "
                f"--config file: {as_typed(field.name, field.default)})"
            )
    return found


class EpisodeRewards:
    """The weighted sources of one episode.

    Args:
        sources: source name -> source.
        weights: source name -> weight.
        task: the episode's task.
        start: how it begins.
        watch: decides when an episode without progress is truncated; None: never.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float],
        task: TaskSpec,
        start: EpisodeStart,
        watch: ProgressWatch | None = None,
    ):
        self._weights = dict(weights)
        self._names = list(sources)
        self._episodes = {n: s.create(task, start) for n, s in sources.items() if isinstance(s, RewardSource)}
        self._watch = watch
        self._executed: list[int] = []
        self._finished: dict[str, dict[str, Any]] = {}
        self._late: set[str] = set()
        self.failed = False
        self.stalled = False

    def score_chunk(self, result: ChunkResult) -> dict[str, np.ndarray]:
        """Weighted reward of each source for a chunk, name -> [A] float32; zero where not executed or not yet known.

        Afterwards `failed` says that a source has ended the episode, `stalled` that there was no progress for long.
        """
        rewards = {name: np.zeros(len(result.rewards), dtype=np.float32) for name in self._names}
        for step in range(result.steps_executed):
            last = step == result.steps_executed - 1
            info = StepInfo(
                success=bool(result.successes[step]),
                terminated=last and result.terminated,
                truncated=last and result.truncated,
            )
            events = result.events[step] if result.events else frozenset()
            observation = result.observation if last else None
            for name, source in self._episodes.items():
                reward = source.step(observation, events, info)
                if reward is None:
                    self._late.add(name)
                else:
                    rewards[name][step] = self._weights[name] * reward
            if self._watch is not None:
                self._watch.step([getattr(source, "progress", None) for source in self._episodes.values()])
        self._executed.append(result.steps_executed)
        self.failed |= any(getattr(source, "failed", False) for source in self._episodes.values())
        self.stalled |= self._watch is not None and self._watch.stalled
        return rewards

    def end(self, *, terminated: bool, truncated: bool) -> None:
        """The episode is over: sources that look at its end are told at once, so that they can begin with it."""
        for source in self._episodes.values():
            if hasattr(source, "end"):
                source.end(terminated=terminated, truncated=truncated)

    def source(self, name: str) -> Any:
        """The episode's part of a source."""
        return self._episodes[name]

    def settle(self, sample: Sample, judged: Mapping[str, float | np.ndarray]) -> None:
        """Write late rewards and the sources' numbers into the finished episode's sample."""
        for name, source in self._episodes.items():
            content = source.finish()
            sample.reward_info.update({f"{name}_{key}": value for key, value in numbers_only(content).items()})
            if name in self._late:
                self._place(sample, name, content["rewards"])
        for name, reward in judged.items():
            steps = sum(self._executed)
            if np.ndim(reward) == 0:
                reward = np.concatenate([np.zeros(steps - 1), [float(reward)]])
            self._place(sample, name, reward)
        components = list(sample.reward_components.values())
        sample.rewards = sum(components[1:], start=components[0].clone())

    def _place(self, sample: Sample, name: str, rewards: Any) -> None:
        """One entry per executed step, into the grid [S, A] of the sample."""
        flat = np.asarray(rewards, dtype=np.float32)
        steps = sum(self._executed)
        if flat.shape != (steps,) or not np.isfinite(flat).all():
            raise ValueError(
                f"reward source {name} must give one finite number for each of the {steps} steps of the episode, got "
                f"shape {list(flat.shape)}" + ("" if np.isfinite(flat).all() else " with NaN or infinity")
            )
        grid, first = sample.reward_components[name], 0
        for row, executed in enumerate(self._executed):
            for column in range(executed):
                grid[row, column] += self._weights[name] * float(flat[first + column])
            first += executed

    def release(self) -> None:
        """Release every source."""
        for source in self._episodes.values():
            source.release()

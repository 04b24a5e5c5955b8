"""Weighted sum of reward sources: `RewardPlan` for a run, `EpisodeRewards` for an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.options import options_of
from rlvla.rewards.background import NamedNumbers
from rlvla.rewards.base import (
    REWARDS,
    EpisodeStart,
    RewardSource,
    SampleSource,
    StepInfo,
    component_of,
    parse_rewards,
    scores_of_decisions,
    source_of,
)
from rlvla.rewards.config import REWARD_MODEL, RewardConfig
from rlvla.rewards.overlong import OVERLONG
from rlvla.rewards.schedule import WeightSchedule, fraction_done, parse_schedules
from rlvla.rewards.success_source import SIMULATOR, SuccessConfig, SuccessSource, make_success_source
from rlvla.rewards.truncation import ProgressWatch
from rlvla.rewards.vlm.questions import question_named
from rlvla.utils.cli.flags import no_effect_problems
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.terminal import log

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rlvla.envs.base import ChunkResult, TaskSpec
    from rlvla.experience import Sample


def make_source(component: str, config: RewardConfig) -> Any:
    """Create the source of a component."""
    name, kind = source_of(component)
    settings = config if REWARDS.options(name) is None else options_of(config, REWARDS, name)
    return REWARDS.get(name)(settings) if kind is None else REWARDS.get(name)(settings, kind)


class RewardPlan:
    """The reward sources of a run and their weights.

    Args:
        weights: source name -> weight.
        config: settings of the sources.
        sources: source name -> source; by default they are created from the registry.
        success: the success detector; None: the simulator.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        config: RewardConfig | None = None,
        sources: Mapping[str, Any] | None = None,
        success: SuccessSource | None = None,
    ):
        self.config = config or RewardConfig()
        self._weights = dict(weights)
        self.sources = {name: (sources or {}).get(name) or make_source(name, self.config) for name in weights}
        self.success = success
        self._servers = _shared_servers(self._all_sources)
        self._others: list[Any] = []
        self._schedules: dict[str, WeightSchedule] = parse_schedules(self.config.reward_schedule, self._weights)
        self._fraction = 0.0

    @classmethod
    def from_config(cls, config: RewardConfig, success: SuccessConfig | None = None) -> RewardPlan:
        """The plan for these flags; ConfigError with all problems that do not depend on the task."""
        problems: list[str | Problem] = []
        weights: dict[str, float] = {}
        try:
            weights = parse_rewards(config.reward)
        except ConfigError as error:
            problems += error.problems
        names = [component_of(spec) for spec in config.reward]
        if config.reward_pretrain is not None:
            if REWARD_MODEL in weights:
                problems.append(f"--reward_pretrain: there is a source '{REWARD_MODEL}' in --reward; rename that")
            # float32 like the scores, so that their product is rounded only once
            weights[REWARD_MODEL] = float(np.float32(config.reward_model_coef))
            names.append(REWARD_MODEL)
        if options_of(config, REWARDS, OVERLONG).overlong_buffer_len > 0:
            if OVERLONG in weights:
                problems.append(f"--overlong_buffer_len: there is a source '{OVERLONG}' in --reward; rename that")
            weights[OVERLONG] = 1.0
            names.append(OVERLONG)
        try:
            parse_schedules(config.reward_schedule, names)
        except ConfigError as error:
            problems += error.problems
        sources = {}
        for name in weights:
            try:
                sources[name] = make_source(name, config)
            except ConfigError as error:
                problems += error.problems
        success, judge = success or SuccessConfig(), None
        try:
            judge = make_success_source(success, config)
        except ConfigError as error:
            problems += error.problems
        problems += no_effect_problems([config, success], {}, ())
        problems += _truncation_problems(config, weights)
        if problems:
            raise ConfigError(dict.fromkeys(problems))  # several questions to one server have the same problems with it
        return cls(weights, config, sources, judge)

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Problems of the sources for these tasks."""
        checked = [source for source in self._all_sources if hasattr(source, "problems")]
        return [*(problem for source in checked for problem in source.problems(tasks)), *self._early_ends(tasks)]

    def _early_ends(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Sources that may end an episode on a frame that the success detector does not see."""
        if self.success is None or self.success.every == 1:
            return []
        names = [n for n, s in self.sources.items() if hasattr(s, "ends_episodes") and s.ends_episodes(tasks)]
        causes = [f"the source {name} of --reward" for name in names]
        causes += ["--dynamic_truncation"] if self.config.dynamic_truncation else []
        if not causes:
            return []
        text = (
            f"--success_every {self.success.every}: {' and '.join(causes)} may end an episode on a frame that is not "
            "judged, and a success would count as a failure; give --success_every 1"
        )
        return [Problem("success_every", "contradiction", text)]

    @property
    def _all_sources(self) -> list[Any]:
        """The reward sources and the success detector, if there is one."""
        return [*self.sources.values(), *([] if self.success is None else [self.success.judge])]

    def _with(self, method: str) -> list[Any]:
        """The sources and servers that have an optional method."""
        return [part for part in [*self._all_sources, *self._servers, *self._others] if hasattr(part, method)]

    def attach(self, part: Any) -> None:
        """Include the metrics, the check and the end of another user of a server, see `RewardSource`."""
        self._others.append(part)

    @property
    def names(self) -> list[str]:
        """Component names, in the order of the flags."""
        return list(self._weights)

    @property
    def success_source(self) -> str:
        """Value of `--success_source`: "simulator", or the name of a success detector."""
        return SIMULATOR if self.success is None else self.success.name

    def judge_waiting(self) -> None:
        """Let a success detector that answers questions in batches answer those that are queued."""
        if self.success is not None and hasattr(self.success.judge, "answer_waiting"):
            self.success.judge.answer_waiting()

    def rollout_over(self) -> None:
        """Let the success detector free resources that it needs only during rollouts."""
        if self.success is not None and hasattr(self.success.judge, "rollout_over"):
            self.success.judge.rollout_over()

    def weights(self) -> dict[str, float]:
        """Current weights, schedules applied."""
        factors = {name: schedule.at(self._fraction) for name, schedule in self._schedules.items()}
        return {name: weight * factors.get(name, 1.0) for name, weight in self._weights.items()}

    def start_iteration(self, index: int, total: int) -> None:
        """Advance schedules and curricula to iteration `index` (from 0) of `total`."""
        self._fraction = fraction_done(index, total)
        for source in self.sources.values():
            if hasattr(source, "start_iteration"):
                source.start_iteration(self._fraction)

    def start(self) -> None:
        """Start all sources before the first episode; their exceptions propagate."""
        for source in self._with("start"):
            source.start()

    def close(self) -> None:
        """Close all sources after the last episode."""
        for source in self._with("close"):
            source.close()

    def begin(self, task: TaskSpec, start: EpisodeStart) -> EpisodeRewards:
        """Create the rewards of a new episode."""
        config = self.config
        watch = ProgressWatch(config.truncation_patience, config.truncation_min_gain)
        return EpisodeRewards(self.sources, self.weights(), task, start, watch if config.dynamic_truncation else None)

    @property
    def looks_at_images(self) -> bool:
        """Whether any source needs the images of finished episodes; sources opt out with `needs_images = False`."""
        sources = [source for source in self.sources.values() if isinstance(source, SampleSource)]
        return any(getattr(source, "needs_images", True) for source in sources)

    def submit(self, sample: Sample) -> None:
        """Pass a finished episode to the sources that score whole episodes."""
        for source in self.sources.values():
            if isinstance(source, SampleSource):
                source.submit(sample)

    def collect(self, count: int) -> list[dict[str, Any]]:
        """Source name -> reward, for each of the `count` episodes submitted since the last call, in order."""
        scored: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, source in self.sources.items():
            if isinstance(source, SampleSource):
                for entry, reward in zip(scored, source.collect()):
                    entry[name] = reward
        return scored

    def metrics(self) -> dict[str, float]:
        """Metrics of the sources since the last call, to be summed over ranks."""
        metrics: dict[str, float] = {}
        for source in self._with("metrics"):
            metrics |= source.metrics()
        return metrics

    def check(self, metrics: Mapping[str, float]) -> None:
        """Let sources check the metrics of all ranks; they raise if training cannot continue."""
        for source in self._with("check"):
            source.check(metrics)


def _truncation_problems(config: RewardConfig, weights: Mapping[str, float]) -> list[Problem]:
    """--dynamic_truncation without a source that measures progress."""
    late = config.rm_propositions == "vlm" and not config.rm_propositions_wait
    if not config.dynamic_truncation or ("rm" in weights and not late):
        return []
    questions = [kind or config.vlm_scorer for name, kind in map(source_of, weights) if name == "vlm"]
    if not questions:
        remedy = "give --rm_propositions_wait" if "rm" in weights else "add rm or vlm to --reward"
        text = f"--dynamic_truncation needs a source that sees progress while an episode goes on: {remedy}"
        return [Problem("dynamic_truncation", "needs_flag", text)]
    if not any(question_named(name).measures_progress for name in questions):
        text = (
            f"--dynamic_truncation: the question {questions[0]} measures no progress while an episode goes on; take "
            "another --vlm_scorer, or add rm to --reward"
        )
        return [Problem("dynamic_truncation", "needs_flag", text)]
    return []


def _shared_servers(sources: Sequence[Any]) -> list[Any]:
    """Let sources with equal server keys share the first server; returns the servers."""
    servers: dict[Any, Any] = {}
    for source in sources:
        server = getattr(source, "server", None)
        if server is not None:
            first = servers.setdefault(server.key, server)
            source.server = first if first is server else first.shared(server)
    return list(servers.values())


@cache
def _note_old_hook(source: type) -> None:
    """Warn once per class of a user."""
    log.warning(f"{source.__name__}.look_at_end is called query_final_frame now; the old name goes with release 0.4")


@dataclass(frozen=True)
class PaidRewards:
    """The rewards of an episode.

    Attributes:
        components: source -> weighted reward of each action, [S, A] float32; 0 for actions that were not executed.
        info: metrics of the episode from `EpisodeReward.finish`.
        scores: source -> action score and progress of each decision, [S, 2] float32, NaN where it did not judge.
    """

    components: dict[str, np.ndarray]
    info: dict[str, float] = field(default_factory=dict)
    scores: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def total(self) -> np.ndarray:
        """Sum over the sources, [S, A]."""
        components = list(self.components.values())
        return sum(components[1:], start=components[0].copy())


class EpisodeRewards:
    """The weighted sources of one episode.

    Args:
        sources: source name -> source.
        weights: source name -> weight.
        task: the episode's task.
        start: information about its start.
        watch: detects episodes without progress; None disables dynamic truncation.
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
        self._chunks: list[dict[str, np.ndarray]] = []
        self._late: set[str] = set()
        self._time_is_up = False
        self._ended_stalled = False
        self.failed = False
        self.stalled = False

    def look(self, result: ChunkResult) -> list[Future[Any]]:
        """Show the sources a chunk before it is scored; returns the answers to wait for until then."""
        looking = [source for source in self._episodes.values() if hasattr(source, "look")]
        return [answer for source in looking for answer in source.look(result)]

    def query_final_frame(self, result: ChunkResult) -> list[Future[Any]]:
        """Notify the sources before scoring a chunk that a success detector ended the episode with it; as `look`."""
        answers: list[Future[Any]] = []
        for source in self._episodes.values():
            if hasattr(source, "query_final_frame"):
                answers += source.query_final_frame(result)
            elif hasattr(source, "look_at_end"):
                _note_old_hook(type(source))
                answers += source.look_at_end(result)
        return answers

    def score_chunk(self, result: ChunkResult) -> dict[str, np.ndarray]:
        """Weighted reward of each source for a chunk, name -> [A] float32; 0 where not executed or not yet known.

        Sets `failed` if a source ends the episode, and `stalled` if no progress was made for too long.
        """
        rewards = {name: np.zeros(len(result.rewards), dtype=np.float32) for name in self._names}
        for step in range(result.steps_executed):
            last = step == result.steps_executed - 1
            info = StepInfo(
                success=bool(result.successes[step]),
                terminated=last and result.terminated,
                truncated=last and result.truncated,
                reward=float(result.rewards[step]),
                components={name: float(values[step]) for name, values in result.components.items()},
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
                measured = {n: s.progress for n, s in self._episodes.items() if hasattr(s, "progress")}
                self._watch.step(measured)
        for name, source in self._episodes.items():
            if self._watch is not None and hasattr(source, "late_progress"):
                self._watch.answered(name, source.late_progress())
        self._time_is_up = bool(result.truncated)
        self._executed.append(result.steps_executed)
        self._chunks.append(rewards)
        self.failed |= any(getattr(source, "failed", False) for source in self._episodes.values())
        self.stalled |= self._watch is not None and self._watch.stalled
        return rewards

    def end(self, *, terminated: bool, truncated: bool) -> None:
        """The episode is over; sources with an `end` method are notified at once."""
        self._ended_stalled = truncated and self.stalled and not self._time_is_up
        for source in self._episodes.values():
            if hasattr(source, "end"):
                source.end(terminated=terminated, truncated=truncated)

    def source(self, name: str) -> Any:
        """The `EpisodeReward` of a source."""
        return self._episodes[name]

    def so_far(self) -> PaidRewards:
        """The rewards that were returned step by step."""
        return PaidRewards({name: np.stack([chunk[name] for chunk in self._chunks]) for name in self._names})

    def finalize_rewards(self, judged: Mapping[str, float | np.ndarray | NamedNumbers]) -> PaidRewards:
        """All rewards of the finished episode, including late rewards and sample sources.

        Args:
            judged: sample source -> reward of the episode, given at its last step, or one reward per executed step;
                with named numbers, these become entries `<source>_<name>` of `info`.

        Raises:
            ValueError: the number of rewards does not match the number of steps, or a reward is not finite.
        """
        paid = self.so_far()
        if self._watch is not None:
            paid.info["stalled"] = float(self._ended_stalled)
        for name, source in self._episodes.items():
            content = source.finish()
            paid.info.update({f"{name}_{key}": float(value) for key, value in content.items() if key != "rewards"})
            if name in self._late:
                self._place(paid, name, content["rewards"])
            if hasattr(source, "scores"):
                paid.scores[name] = scores_of_decisions(self._executed, source.scores())
        for name, reward in judged.items():
            if isinstance(reward, NamedNumbers):
                paid.info.update({f"{name}_{key}": number for key, number in reward.numbers.items()})
                if reward.scores:
                    paid.scores[name] = scores_of_decisions(self._executed, reward.scores)
                reward = reward.reward
            if np.ndim(reward) == 0:
                reward = np.concatenate([np.zeros(sum(self._executed) - 1), [float(reward)]])
            self._place(paid, name, reward)
        return paid

    def _place(self, paid: PaidRewards, name: str, rewards: Any) -> None:
        """Add rewards, one per executed step, to the [S, A] grid of a component."""
        flat = np.asarray(rewards, dtype=np.float32)
        steps = sum(self._executed)
        if flat.shape != (steps,) or not np.isfinite(flat).all():
            raise ValueError(
                f"reward source {name} must give one finite number for each of the {steps} steps of the episode, got "
                f"shape {list(flat.shape)}" + ("" if np.isfinite(flat).all() else " with NaN or infinity")
            )
        grid, first = paid.components[name], 0
        for row, executed in enumerate(self._executed):
            for column in range(executed):
                grid[row, column] += np.float32(self._weights[name] * float(flat[first + column]))
            first += executed

    def release(self) -> None:
        """Release every source."""
        for source in self._episodes.values():
            source.release()

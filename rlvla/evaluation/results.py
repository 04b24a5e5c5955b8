"""Results of an evaluation: success rates with confidence intervals, episode outcomes, tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlvla.envs.base import TaskSpec
from rlvla.evaluation.statistics import clustered_interval, mean_interval, wilson_interval
from rlvla.experience import Sample
from rlvla.rewards.success_source import SIMULATOR
from rlvla.rollout import FinishedEpisode
from rlvla.utils.terminal import table

LISTED = 100  # above this number of tasks, tables list categories instead, if tasks have any
TASK_GROUPS = ("seen tasks", "unseen tasks")


@dataclass(frozen=True)
class Rate:
    """A success rate of `n` episodes with its 95 % interval."""

    rate: float
    n: int
    low: float
    high: float

    @classmethod
    def of(cls, outcomes: Sequence[bool]) -> Rate:
        """From the outcomes of episodes."""
        low, high = wilson_interval(sum(outcomes), len(outcomes))
        return cls(sum(outcomes) / len(outcomes), len(outcomes), low, high)

    @classmethod
    def of_clusters(cls, clusters: Sequence[Sequence[bool]], *, graded: bool = False) -> Rate:
        """From outcomes clustered by initial state, task or run, see `clustered_interval`."""
        counts = [(sum(cluster), len(cluster)) for cluster in clusters]
        low, high = clustered_interval(counts, graded=graded)
        total = sum(n for _, n in counts)
        return cls(sum(successes for successes, _ in counts) / total, total, low, high)

    @classmethod
    def over_runs(cls, runs: Sequence[EvalResult]) -> Rate:
        """Success at end of several training runs, such as seeds, from the same initial states.

        The interval is over these states.
        """
        return _rate([episode for run in runs for episode in run.episodes], lambda episode: episode.success_at_end)

    @classmethod
    def mean(cls, rates: Sequence[Rate]) -> Rate:
        """Unweighted mean of independent rates; `n` is the total number of episodes."""
        rate, low, high = mean_interval([(r.rate, r.low, r.high) for r in rates])
        return cls(rate, sum(r.n for r in rates), low, high)

    def __str__(self) -> str:
        return f"{100 * self.rate:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def eval_uid(task_id: int, init_state_id: int, sample: int = 0) -> str:
    """The uid of an evaluation episode."""
    return f"eval/{task_id}/{init_state_id}" + (f"/{sample}" if sample else "")


def sample_of(uid: str) -> int:
    """Sample index of an evaluation episode within its initial state, from its uid."""
    match = re.fullmatch(r"eval/[^/]*/[^/]*/(\d+)", uid)
    return int(match[1]) if match else 0


@dataclass(frozen=True)
class EpisodeOutcome:
    """Outcome of an evaluation episode.

    Attributes:
        task_id, init_state_id: identify the episode; outcomes of two policies are paired by them.
        success_at_end, success_once: see `rlvla.experience.Sample`.
        length: environment steps.
        regressions: how often success was lost again.
        sample: index of the episode within its initial state, counted from 0.
        simulator_once, simulator_at_end, unanswered: see `rlvla.experience.Sample`.
        failure: why the policy had no actions, so that the episode failed; "" if it had.
    """

    task_id: int
    init_state_id: int
    success_at_end: bool
    success_once: bool
    length: int
    regressions: int = 0
    sample: int = 0
    simulator_once: bool | None = None
    simulator_at_end: bool | None = None
    unanswered: int = 0
    failure: str = ""

    @classmethod
    def of(cls, episode: Sample | FinishedEpisode) -> EpisodeOutcome:
        """From a finished episode."""
        return cls(
            episode.task_id,
            episode.init_state_id,
            bool(episode.success_at_end),
            bool(episode.success_once),
            int(episode.finish_step),
            int(episode.regressions),
            sample_of(episode.uid),
            simulator_once=episode.simulator_once,
            simulator_at_end=episode.simulator_at_end,
            unanswered=int(episode.unanswered),
            failure=getattr(episode, "failure", ""),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the simulator's success and `unanswered` only if a judge detected success, `failure` if any."""
        judged = () if self.simulator_at_end is not None else ("simulator_once", "simulator_at_end", "unanswered")
        left_out = (*judged, *(() if self.failure else ("failure",)))
        return {name: value for name, value in asdict(self).items() if name not in left_out}


@dataclass(frozen=True)
class Agreement:
    """Confusion counts of a judge's success at end against the simulator's.

    Attributes:
        both, neither: episodes in which they agree on success, and on failure.
        judge_only, simulator_only: episodes that only one of them counts as a success.
    """

    both: int = 0
    neither: int = 0
    judge_only: int = 0
    simulator_only: int = 0

    @classmethod
    def of(cls, pairs: Iterable[tuple[bool, bool | None]]) -> Agreement | None:
        """From (judge, simulator) of each episode; None if the simulator is the success detector."""
        counts = Counter((judge, simulator) for judge, simulator in pairs if simulator is not None)
        both, neither = counts[True, True], counts[False, False]
        return cls(both, neither, counts[True, False], counts[False, True]) if counts else None

    @property
    def n(self) -> int:
        """Number of episodes."""
        return self.both + self.neither + self.judge_only + self.simulator_only

    @property
    def share(self) -> float:
        """Share of the episodes in which they agree."""
        return (self.both + self.neither) / self.n

    @property
    def simulator_rate(self) -> float:
        """Success rate by the simulator."""
        return (self.both + self.simulator_only) / self.n

    def headers(self, source: str) -> tuple[str, str, str]:
        """Headers of `rows`."""
        return (f"success at end, {source} against simulator", "simulator: yes", "simulator: no")

    def rows(self, source: str) -> list[tuple[str, int, int]]:
        """Confusion matrix."""
        return [(f"{source}: yes", self.both, self.judge_only), (f"{source}: no", self.simulator_only, self.neither)]


@dataclass(frozen=True)
class TaskResult:
    """Results of a policy on one task; `category` as in `TaskSpec`."""

    task_id: int
    name: str
    success_at_end: Rate
    success_once: Rate
    mean_length: float
    regressions: float = 0.0
    category: str = ""


@dataclass(frozen=True)
class EvalResult:
    """Results of a policy on all tasks.

    Attributes:
        protocol: "heldout" (states never trained on), "shared", or a description of the selected states.
        greedy: whether the most likely actions were taken, or actions sampled.
        success_at_end, success_once: over all episodes of all tasks.
        mean_length: environment steps per episode.
        tasks: results per task.
        regressions: how often success was lost again, per episode.
        dropped: requested episodes that could not be played; they are excluded from all results.
        episodes: all episodes, sorted by task, initial state and sample.
        samples: episodes per initial state; with more than one, intervals allow for their dependence.
        pass_at_k: share of the initial states of which at least one of k = `samples` episodes succeeded at the end (of
            states with all their episodes); None with one episode per state.
        success_source: success detector, see `--success_source`.
        unseen_tasks: ids of the tasks that the policy was not trained on; () also if that is not recorded.
    """

    protocol: str
    greedy: bool
    success_at_end: Rate
    success_once: Rate
    mean_length: float
    tasks: tuple[TaskResult, ...]
    regressions: float = 0.0
    dropped: int = 0
    episodes: tuple[EpisodeOutcome, ...] = ()
    samples: int = 1
    pass_at_k: Rate | None = None
    success_source: str = SIMULATOR
    unseen_tasks: tuple[int, ...] = ()

    @property
    def listed(self) -> list[tuple[str, frozenset[int]]]:
        """(name, task ids) of the rows of tables and charts: tasks, or categories of more than `LISTED` tasks."""
        categories = dict.fromkeys(task.category for task in self.tasks)
        if len(self.tasks) <= LISTED or not any(categories):
            return [(task.name, frozenset([task.task_id])) for task in self.tasks]
        return [(c or "-", frozenset(t.task_id for t in self.tasks if t.category == c)) for c in categories]

    def of_listed(self, name: str, ids: frozenset[int]) -> TaskResult | None:
        """The results of an entry of `listed`, of these or other results; None if its tasks were not played."""
        tasks = [task for task in self.tasks if task.task_id in ids]
        if len(ids) == 1 or not tasks:
            return tasks[0] if tasks else None
        return self.of_tasks(f"{name} ({len(tasks)})", {task.task_id for task in tasks})

    @property
    def task_groups(self) -> dict[str, frozenset[int]]:
        """`TASK_GROUPS` -> task ids: tasks seen and not seen in training; {} if there is one task, or all were seen."""
        played = frozenset(task.task_id for task in self.tasks)
        unseen = played & frozenset(self.unseen_tasks)
        if len(played) == 1 or not unseen:
            return {}
        return {name: ids for name, ids in zip(TASK_GROUPS, (played - unseen, unseen)) if ids}

    def of_tasks(self, name: str, ids: Collection[int]) -> TaskResult:
        """Results over the played ones of these tasks, with intervals over tasks; ValueError if none was played."""
        by_task: dict[int, list[EpisodeOutcome]] = {}
        for episode in self.episodes:
            if episode.task_id in ids:
                by_task.setdefault(episode.task_id, []).append(episode)
        at_end = Rate.of_clusters([[e.success_at_end for e in episodes] for episodes in by_task.values()])
        once = Rate.of_clusters([[e.success_once for e in episodes] for episodes in by_task.values()])
        return TaskResult(-1, name, at_end, once, *_counts([e for episodes in by_task.values() for e in episodes]))

    @property
    def mode(self) -> str:
        """How actions were chosen: "greedy" or "sampled"."""
        return "greedy" if self.greedy else "sampled"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        content = asdict(self) | {"episodes": [episode.as_dict() for episode in self.episodes]}
        if self.samples == 1:
            del content["samples"], content["pass_at_k"]
            for episode in content["episodes"]:
                del episode["sample"]
        if not self.unseen_tasks:
            del content["unseen_tasks"]
        for task in content["tasks"]:
            if not task["category"]:
                del task["category"]
        agreement = self.agreement
        return content if agreement is None else content | {"agreement": asdict(agreement)}

    @property
    def agreement(self) -> Agreement | None:
        """A judge's success against the simulator's; None if the simulator is the success detector."""
        return Agreement.of((e.success_at_end, e.simulator_at_end) for e in self.episodes)

    @property
    def success_detector(self) -> str:
        """Phrase for reports, with the number of questions that a judge left unanswered."""
        source = "the simulator" if self.success_source == SIMULATOR else self.success_source
        unanswered = sum(e.unanswered for e in self.episodes)
        return f"success detector: {source}" + (f" ({unanswered} question(s) without an answer)" if unanswered else "")

    @property
    def about_failures(self) -> str:
        """Number of episodes that failed because the policy had no actions, with the first reason; "" if none did."""
        reasons = [episode.failure for episode in self.episodes if episode.failure]
        return f"{len(reasons)} EPISODES FAILED WITHOUT ACTIONS OF THE POLICY: {reasons[0]}" if reasons else ""

    @property
    def kind_of_intervals(self) -> str:
        """Method of the intervals of success rates."""
        return "Wilson intervals" if self.samples == 1 else "intervals clustered by initial state"

    @property
    def about_samples(self) -> str:
        """Episodes per initial state, pass@k, kind of intervals; "" with one episode per state and no `task_groups`."""
        groups = self.task_groups
        kind = f"95 % {self.kind_of_intervals}" + (f", those of {' and '.join(groups)} over tasks" if groups else "")
        if self.samples == 1:
            return kind if groups else ""
        passed = "" if self.pass_at_k is None else f", pass@{self.samples} {self.pass_at_k}"
        return f"{self.samples} episodes per initial state{passed}; {kind}"

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> EvalResult:
        """The inverse of `as_dict`."""
        content = {name: value for name, value in content.items() if name != "agreement"}
        rates = {name: Rate(**content[name]) for name in ("success_at_end", "success_once")}
        tasks = [
            TaskResult(**{**task, **{name: Rate(**task[name]) for name in ("success_at_end", "success_once")}})
            for task in content["tasks"]
        ]
        episodes = tuple(EpisodeOutcome(**episode) for episode in content.get("episodes", ()))
        content["unseen_tasks"] = tuple(content.get("unseen_tasks", ()))
        if content.get("pass_at_k") is not None:
            rates["pass_at_k"] = Rate(**content["pass_at_k"])
        return cls(**{**content, **rates, "tasks": tuple(tasks), "episodes": episodes})

    def as_metrics(self, prefix: str | None = None) -> dict[str, float]:
        """For TensorBoard; the prefix is `eval` or, if actions were sampled, `eval_sampled`, unless one is given."""
        prefix = prefix or ("eval" if self.greedy else "eval_sampled")
        metrics = {
            f"{prefix}/success_at_end": self.success_at_end.rate,
            f"{prefix}/success_once": self.success_once.rate,
            f"{prefix}/episode_length": self.mean_length,
            f"{prefix}/regressions": self.regressions,
            f"{prefix}/dropped": float(self.dropped),
            f"{prefix}/n": float(self.success_at_end.n),
        }
        if self.samples > 1:
            metrics[f"{prefix}/success_at_end_low"] = self.success_at_end.low
            metrics[f"{prefix}/success_at_end_high"] = self.success_at_end.high
        if self.pass_at_k is not None:
            metrics[f"{prefix}/pass_at_{self.samples}"] = self.pass_at_k.rate
        agreement = self.agreement
        if agreement is not None:
            metrics |= {
                f"{prefix}/simulator_success_at_end": agreement.simulator_rate,
                f"{prefix}/success_judge_only": agreement.judge_only / agreement.n,
                f"{prefix}/success_simulator_only": agreement.simulator_only / agreement.n,
                f"{prefix}/success_unanswered": float(sum(e.unanswered for e in self.episodes)),
            }
        if len(self.tasks) > 1:
            metrics |= {f"{prefix}_tasks/{t.name}": t.success_at_end.rate for t in self.tasks}
        return metrics

    def rows(self) -> list[tuple[str, int, str, str, str, str]]:
        """Table rows for `HEADERS`, one per `listed`; with several tasks seen and unseen ones and the total follow."""
        groups = [self.of_tasks(f"{name} ({len(ids)})", ids) for name, ids in self.task_groups.items()]
        listed = [self.of_listed(*entry) for entry in self.listed]
        total = [table_row("all", self)] if len(self.tasks) > 1 else []
        return [*(table_row(entry.name, entry) for entry in (*filter(None, listed), *groups)), *total]

    HEADERS = ("task", "n", "success at end [95 %]", "success once [95 %]", "steps", "lost again")

    def as_table(self, note: str = "") -> str:
        """For the terminal, followed by mode, protocol and the note."""
        notes = [f"{self.mode}, protocol {self.protocol}", self.success_detector]
        notes += filter(None, [note, self.about_samples, self.about_failures])
        notes += [f"{self.dropped} EPISODES COULD NOT BE PLAYED and are in no figure"] if self.dropped else []
        text = f"{table(self.HEADERS, self.rows())}\n({'; '.join(notes)})"
        agreement, source = self.agreement, self.success_source
        return text if agreement is None else f"{text}\n\n{table(agreement.headers(source), agreement.rows(source))}"


def table_row(name: str, result: Any) -> tuple[str, int, str, str, str, str]:
    """A row for `EvalResult.HEADERS`, from anything with the averages of a `TaskResult`."""
    at_end, once = result.success_at_end, result.success_once
    return name, at_end.n, str(at_end), str(once), f"{result.mean_length:.1f}", f"{result.regressions:.2f}"


def summarize(
    outcomes: Sequence[EpisodeOutcome],
    tasks: Sequence[TaskSpec],
    protocol: str,
    greedy: bool,
    *,
    requested: int | None = None,
    samples: int = 1,
    success_source: str = SIMULATOR,
) -> EvalResult:
    """Aggregate the outcomes of all episodes, `samples` per initial state; RuntimeError if a task has none.

    `requested` is the number of requested episodes (default: number of outcomes).
    """
    order = {task.task_id: position for position, task in enumerate(tasks)}
    outcomes = sorted(outcomes, key=lambda o: (order[o.task_id], o.init_state_id, o.sample))
    results = []
    for task in tasks:
        of_task = [outcome for outcome in outcomes if outcome.task_id == task.task_id]
        if of_task:
            results.append(TaskResult(task.task_id, task.name, *_averages(of_task), task.category))
        elif not (task.category and outcomes):  # of many tasks with a single episode, one may be dropped
            raise RuntimeError(f"no evaluation episode of {task.name} could be played to its end")
    at_end, once, length, regressions = _averages(outcomes)
    complete = [group for group in _by_state(outcomes) if len(group) == samples > 1]
    return EvalResult(
        protocol,
        greedy,
        at_end,
        once,
        length,
        tuple(results),
        regressions,
        dropped=(requested or len(outcomes)) - len(outcomes),
        episodes=tuple(outcomes),
        samples=samples,
        pass_at_k=Rate.of([any(o.success_at_end for o in group) for group in complete]) if complete else None,
        success_source=success_source,
    )


def _by_state(outcomes: Sequence[EpisodeOutcome]) -> list[list[EpisodeOutcome]]:
    """The outcomes of each initial state."""
    groups: dict[tuple[int, int], list[EpisodeOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.task_id, outcome.init_state_id), []).append(outcome)
    return list(groups.values())


def _rate(outcomes: Sequence[EpisodeOutcome], success: Callable[[EpisodeOutcome], bool]) -> Rate:
    groups = _by_state(outcomes)
    if len(groups) == len(outcomes):
        return Rate.of([success(outcome) for outcome in outcomes])
    return Rate.of_clusters([[success(outcome) for outcome in group] for group in groups])


def _averages(outcomes: Sequence[EpisodeOutcome]) -> tuple[Rate, Rate, float, float]:
    at_end, once = (_rate(outcomes, lambda o: o.success_at_end), _rate(outcomes, lambda o: o.success_once))
    return at_end, once, *_counts(outcomes)


def _counts(outcomes: Sequence[EpisodeOutcome]) -> tuple[float, float]:
    """Mean length and regressions."""
    return sum(o.length for o in outcomes) / len(outcomes), sum(o.regressions for o in outcomes) / len(outcomes)

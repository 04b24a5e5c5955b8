"""Results of an evaluation: success rates with confidence intervals, episode outcomes, tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlvla.envs.base import TaskSpec
from rlvla.evaluation.statistics import clustered_interval, mean_interval, wilson_interval
from rlvla.experience import Sample
from rlvla.rewards.success_source import SIMULATOR
from rlvla.rollout import FinishedEpisode
from rlvla.utils.terminal import markdown_table, table

# Of more tasks than these, categories are listed instead, if tasks have some.
LISTED = 100
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
        """From the outcomes of several episodes of each initial state, task or run, see `clustered_interval`."""
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
    """The number of the episode among those of its initial state, from its uid."""
    parts = uid.split("/")
    return int(parts[3]) if parts[0] == "eval" and len(parts) == 4 else 0


@dataclass(frozen=True)
class EpisodeOutcome:
    """Outcome of an evaluation episode.

    Attributes:
        task_id, init_state_id: identify the episode; outcomes of two policies are paired by them.
        success_at_end, success_once: see `rlvla.experience.Sample`.
        length: environment steps.
        regressions: how often success was lost again.
        sample: number of the episode among those of its initial state, counted from 0.
        simulator_once, simulator_at_end, unanswered: see `rlvla.experience.Sample`.
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
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; without what concerns judges of success if there was none."""
        judged = ("simulator_once", "simulator_at_end", "unanswered")
        kept = asdict(self)
        return kept if self.simulator_at_end is not None else {n: v for n, v in kept.items() if n not in judged}


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
        success_source: what told success, see `--success_source`.
        unseen_tasks: ids of the tasks that the policy has not learned from; () also if that is not recorded.
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
        """What tables and charts list, by name: the tasks, or what they count under if they are more than `LISTED`."""
        categories = dict.fromkeys(task.category for task in self.tasks)
        if len(self.tasks) <= LISTED or not any(categories):
            return [(task.name, frozenset([task.task_id])) for task in self.tasks]
        return [(c or "-", frozenset(t.task_id for t in self.tasks if t.category == c)) for c in categories]

    def of_listed(self, name: str, ids: frozenset[int]) -> TaskResult | None:
        """The results of an entry of `listed`, of these or other results; None if its tasks are not here."""
        found = [task for task in self.tasks if task.task_id in ids]
        if len(ids) == 1 or not found:
            return found[0] if found else None
        return self.of_tasks(f"{name} ({len(found)})", {task.task_id for task in found})

    @property
    def task_groups(self) -> dict[str, frozenset[int]]:
        """Name -> ids of the tasks that the policy has learned from, and of those that it has not.

        Empty if there is one task, or if it has learned from all.
        """
        played = frozenset(task.task_id for task in self.tasks)
        unseen = played & frozenset(self.unseen_tasks)
        if len(played) == 1 or not unseen:
            return {}
        return {name: ids for name, ids in zip(TASK_GROUPS, (played - unseen, unseen)) if ids}

    def of_tasks(self, name: str, ids: Collection[int]) -> TaskResult:
        """Results over some tasks, as far as they were played; the intervals are over tasks, not over episodes.

        Raises:
            ValueError: none was played.
        """
        of_task: dict[int, list[EpisodeOutcome]] = {}
        for episode in self.episodes:
            if episode.task_id in ids:
                of_task.setdefault(episode.task_id, []).append(episode)
        parts = list(of_task.values())
        rates = [
            Rate.of_clusters([[getattr(episode, measure) for episode in part] for part in parts])
            for measure in ("success_at_end", "success_once")
        ]
        episodes = [episode for part in parts for episode in part]
        return TaskResult(-1, name, *rates, *_counts(episodes))

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
        return content if agreement is None else content | {"agreement": agreement.as_dict()}

    @property
    def agreement(self) -> Agreement | None:
        """A judge's success against the simulator's; None if the simulator tells success."""
        return Agreement.of((e.success_at_end, e.simulator_at_end) for e in self.episodes)

    @property
    def told_by(self) -> str:
        """A phrase that says what told success."""
        return told_by(self.success_source, sum(e.unanswered for e in self.episodes))

    @property
    def kind_of_intervals(self) -> str:
        """How the intervals of success rates were computed."""
        return "Wilson intervals" if self.samples == 1 else "intervals clustered by initial state"

    @property
    def about_samples(self) -> str:
        """Episodes per initial state, pass@k, kind of intervals; "" with one episode per state of tasks alike."""
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
        entries = [*filter(None, listed), *groups, *([self] if len(self.tasks) > 1 else [])]
        return [
            (
                entry.name if isinstance(entry, TaskResult) else "all",
                entry.success_at_end.n,
                str(entry.success_at_end),
                str(entry.success_once),
                f"{entry.mean_length:.1f}",
                f"{entry.regressions:.2f}",
            )
            for entry in entries
        ]

    HEADERS = ("task", "n", "success at end [95 %]", "success once [95 %]", "steps", "lost again")

    def as_table(self, note: str = "") -> str:
        """For the terminal, followed by mode, protocol and the note."""
        notes = [f"{self.mode}, protocol {self.protocol}", self.told_by, *filter(None, [note, self.about_samples])]
        notes += [f"{self.dropped} EPISODES COULD NOT BE PLAYED and are in no figure"] if self.dropped else []
        agreement = self.agreement
        beside = "" if agreement is None else f"\n\n{agreement.as_table(self.success_source)}"
        return f"{table(self.HEADERS, self.rows())}\n({'; '.join(notes)}){beside}"


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
    """Aggregate episode outcomes; RuntimeError if a task has none.

    Args:
        outcomes: outcomes of all episodes.
        tasks: the evaluated tasks.
        protocol: name of the protocol.
        greedy: how actions were chosen.
        requested: number of requested episodes (default: number of outcomes).
        samples: episodes requested of each initial state.
        success_source: what told success.
    """
    order = {task.task_id: position for position, task in enumerate(tasks)}
    outcomes = sorted(outcomes, key=lambda o: (order[o.task_id], o.init_state_id, o.sample))
    results = []
    for task in tasks:
        of_task = [outcome for outcome in outcomes if outcome.task_id == task.task_id]
        if not of_task and task.category and outcomes:
            continue  # one of very many, with a single episode; it is counted among the dropped ones
        if not of_task:
            raise RuntimeError(f"no evaluation episode of {task.name} could be played to its end")
        results.append(TaskResult(task.task_id, task.name, *_averages(of_task), task.category))
    at_end, once, length, regressions = _averages(outcomes)
    dropped = (requested or len(outcomes)) - len(outcomes)
    parts = (tuple(results), regressions, dropped, tuple(outcomes), samples, _pass_at(samples, outcomes))
    return EvalResult(protocol, greedy, at_end, once, length, *parts, success_source=success_source)


def _pass_at(samples: int, outcomes: Sequence[EpisodeOutcome]) -> Rate | None:
    complete = [part for part in _by_state(outcomes) if len(part) == samples]
    if samples == 1 or not complete:
        return None
    return Rate.of([any(outcome.success_at_end for outcome in part) for part in complete])


def _by_state(outcomes: Sequence[EpisodeOutcome]) -> list[list[EpisodeOutcome]]:
    """The outcomes of each initial state."""
    parts: dict[tuple[int, int], list[EpisodeOutcome]] = {}
    for outcome in outcomes:
        parts.setdefault((outcome.task_id, outcome.init_state_id), []).append(outcome)
    return list(parts.values())


def _rate(outcomes: Sequence[EpisodeOutcome], success: Callable[[EpisodeOutcome], bool]) -> Rate:
    parts = _by_state(outcomes)
    if len(parts) == len(outcomes):
        return Rate.of([success(outcome) for outcome in outcomes])
    return Rate.of_clusters([[success(outcome) for outcome in part] for part in parts])


def _averages(outcomes: Sequence[EpisodeOutcome]) -> tuple[Rate, Rate, float, float]:
    return (
        _rate(outcomes, lambda outcome: outcome.success_at_end),
        _rate(outcomes, lambda outcome: outcome.success_once),
        *_counts(outcomes),
    )


def _counts(outcomes: Sequence[EpisodeOutcome]) -> tuple[float, float]:
    """Mean length and regressions."""
    return sum(o.length for o in outcomes) / len(outcomes), sum(o.regressions for o in outcomes) / len(outcomes)


@dataclass(frozen=True)
class Agreement:
    """Numbers of episodes by success at the end: as the judge says, and by the simulator's own predicate.

    Attributes:
        both, neither: they agree.
        judge_only: the judge says success, the simulator does not.
        simulator_only: the reverse.
    """

    both: int = 0
    neither: int = 0
    judge_only: int = 0
    simulator_only: int = 0

    @classmethod
    def of(cls, pairs: Iterable[tuple[bool, bool | None]]) -> Agreement | None:
        """From (judge, simulator) of each episode; None if the simulator tells success itself."""
        names = {(True, True): "both", (False, False): "neither", (True, False): "judge_only"}
        counts: dict[str, int] = {}
        for judge, simulator in pairs:
            if simulator is not None:
                name = names.get((judge, simulator), "simulator_only")
                counts[name] = counts.get(name, 0) + 1
        return cls(**counts) if counts else None

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

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)

    def headers(self, source: str) -> tuple[str, str, str]:
        """Headers of `rows`."""
        return (f"success at end, {source} against simulator", "simulator: yes", "simulator: no")

    def rows(self, source: str) -> list[tuple[str, int, int]]:
        """The table of confusions."""
        return [
            (f"{source}: yes", self.both, self.judge_only),
            (f"{source}: no", self.simulator_only, self.neither),
        ]

    def as_table(self, source: str) -> str:
        """For the terminal."""
        return table(self.headers(source), self.rows(source))

    def as_markdown(self, source: str) -> str:
        """For Markdown."""
        return markdown_table(self.headers(source), self.rows(source))


def told_by(source: str, unanswered: int = 0) -> str:
    """A phrase for reports: what told success."""
    words = "the simulator" if source == SIMULATOR else source
    missing = f" ({unanswered} question(s) without an answer)" if unanswered else ""
    return f"success told by {words}{missing}"

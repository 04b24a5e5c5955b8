"""Paired comparison of two policies: differences with score intervals, exact McNemar test."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlvla.evaluation.results import TASK_GROUPS, EpisodeOutcome, EvalResult
from rlvla.evaluation.statistics import (
    clustered_tango_interval,
    mcnemar_exact,
    mean_interval,
    newcombe_interval,
    paired_bootstrap,
    tango_interval,
)
from rlvla.utils.terminal import table

MEASURES = ("success_at_end", "success_once")
MEAN_OF_SUITES = "mean of suites"


@dataclass(frozen=True)
class Difference:
    """Difference in success rate between a policy and a baseline.

    Attributes:
        task: task name or "all"; in a comparison over suites, suite name or "mean of suites".
        measure: "success_at_end" or "success_once".
        n: number of pairs (if unpaired, episodes of the smaller side).
        difference: rate of the policy minus rate of the baseline.
        low, high: 95 % score interval: Tango's if paired (over tasks for "seen tasks" and "unseen tasks", over initial
            states for several runs), Newcombe's if not; for a mean of suites combined by MOVER.
        gained: pairs in which only the policy succeeded; None if unpaired.
        lost: pairs in which only the baseline succeeded; None if unpaired.
        p_value: two-sided exact McNemar test; None if unpaired, or if pairs are not independent.
        bootstrap: 95 % interval of the paired bootstrap; None likewise, or if too few pairs differ.
    """

    task: str
    measure: str
    n: int
    difference: float
    low: float
    high: float
    gained: int | None = None
    lost: int | None = None
    p_value: float | None = None
    bootstrap: tuple[float, float] | None = None

    def in_points(self) -> str:
        """In percentage points, with its interval."""
        return f"{100 * self.difference:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


@dataclass(frozen=True)
class Comparison:
    """Comparison of a policy with a baseline in one mode.

    Attributes:
        policy, baseline: checkpoint folders.
        mode: "greedy" or "sampled".
        protocol_differences: differences between the protocols; empty if paired.
        differences: one per measure and task; if paired, also per entry of `EvalResult.task_groups`; "all" last.
        lost_states: (task id, initial state id) of episodes that only the baseline solved at the end.
    """

    policy: str
    baseline: str
    mode: str
    protocol_differences: tuple[str, ...]
    differences: tuple[Difference, ...]
    lost_states: tuple[tuple[int, int], ...]

    HEADERS = ("task", "measure", "n", "difference [95 %]", "gained", "lost", "p")
    ON_PHONES = ("task", "suite", "measure", "difference [95 %]", "p")  # the columns for which there is room

    @property
    def paired(self) -> bool:
        """Whether both played the same episodes."""
        return not self.protocol_differences

    def overall(self, measure: str = MEASURES[0]) -> Difference:
        """The difference over all tasks."""
        return [d for d in self.differences if d.measure == measure][-1]

    def of_task(self, task: str, measure: str = MEASURES[0]) -> Difference | None:
        """The entry of `differences` for a task or group, or None."""
        return next((d for d in self.differences if (d.task, d.measure) == (task, measure)), None)

    def rows(self) -> list[tuple[Any, ...]]:
        """Table rows for `HEADERS`, in percentage points."""
        return [
            (
                d.task,
                d.measure.replace("_", " "),
                d.n,
                d.in_points(),
                "-" if d.gained is None else d.gained,
                "-" if d.lost is None else d.lost,
                "-" if d.p_value is None else f"{d.p_value:.2g}",
            )
            for d in self.differences
        ]

    def heading(self) -> str:
        """Heading of the table."""
        return f"{self.policy} minus {self.baseline} ({self.mode}, percentage points)"

    def note(self) -> str:
        """Note on the intervals and on differences between the protocols."""
        if self.paired:
            groups = dict.fromkeys(d.task for d in self.differences if d.task in TASK_GROUPS)
            grouped = f"; over {' and '.join(groups)} clustered by task, without a test" if groups else ""
            return f"paired on the same initial states: 95 % score interval (Tango), exact McNemar test{grouped}"
        differing = "; ".join(self.protocol_differences)
        return f"THE PROTOCOLS DIFFER, so the comparison is unpaired (Newcombe interval, no test): {differing}"

    def as_table(self) -> str:
        """For the terminal."""
        return f"{self.heading()}\n{table(self.HEADERS, self.rows())}\n({self.note()})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"paired": self.paired}


def compare(
    policy: str, result: EvalResult, baseline: str, base_result: EvalResult, protocol_differences: Sequence[str] = ()
) -> Comparison:
    """Compare two evaluations of the same mode; unpaired if `protocol_differences` is not empty."""
    names = {task.task_id: task.name for task in result.tasks}
    pairs = _pairs(result, base_result)
    if not pairs and not protocol_differences:
        protocol_differences = ["no initial state from which both could be played"]
    scopes = [*result.listed] if len(names) > 1 else []
    scopes += [] if protocol_differences else [*result.task_groups.items()]
    scopes += [("all", frozenset(names))]
    differences: list[Difference | None] = []
    for measure in MEASURES:
        for task, ids in scopes:
            of_scope = [pair for pair in pairs if pair[0].task_id in ids]
            if protocol_differences:
                differences.append(_unpaired(task, ids, measure, result, base_result))
            elif task in TASK_GROUPS:
                differences.append(_clustered(task, measure, of_scope, lambda episode: episode.task_id))
            else:
                differences.append(_paired(task, measure, of_scope))
    lost = [(own.task_id, own.init_state_id) for own, base in pairs if _sign(MEASURES[0], own, base) < 0]
    kept = tuple(d for d in differences if d is not None)
    return Comparison(
        policy, baseline, result.mode, tuple(protocol_differences), kept, () if protocol_differences else tuple(lost)
    )


def compare_over_runs(runs: Sequence[tuple[EvalResult, EvalResult]]) -> Difference:
    """Difference in success at end over several training runs, all evaluated on the same initial states.

    `runs` holds the results of the policy and of the baseline in each run. The interval covers the choice of initial
    states (`clustered_tango_interval`, a cluster for each), not of runs. ValueError without a common initial state.
    """
    pairs = [pair for run in runs for pair in _pairs(*run)]
    difference = _clustered("all", MEASURES[0], pairs, lambda episode: (episode.task_id, episode.init_state_id))
    if difference is None:
        raise ValueError("the policy and the baseline have no initial state in common")
    return difference


@dataclass(frozen=True)
class SuitesComparison(Comparison):
    """Comparison over several suites, which are weighted equally regardless of their number of tasks."""

    HEADERS = ("suite", *Comparison.HEADERS[1:])

    def heading(self) -> str:
        """Heading of the table."""
        return f"all suites: {super().heading()}"

    def note(self) -> str:
        """Note on the intervals and on differences between the protocols."""
        return super().note() + "; suites have equal weights in the mean, and their intervals are combined (MOVER)"


def compare_over_suites(
    comparisons: Mapping[str, Comparison], results: Mapping[str, tuple[EvalResult, EvalResult]]
) -> SuitesComparison:
    """Combine the comparisons of several suites in one mode; `results` are (policy, baseline) by suite.

    The interval of the mean combines the intervals of the suites; McNemar's test uses the pairs of all suites. There
    is no test if any suite is unpaired.
    """
    first = next(iter(comparisons.values()))
    differing = [f"{suite}: {phrase}" for suite, c in comparisons.items() for phrase in c.protocol_differences]
    differences: list[Difference] = []
    for measure in MEASURES:
        rows = [replace(c.overall(measure), task=suite) for suite, c in comparisons.items()]
        mean, low, high = mean_interval([(d.difference, d.low, d.high) for d in rows])
        total = Difference(MEAN_OF_SUITES, measure, sum(d.n for d in rows), mean, low, high)
        if not differing:
            strata = [[_sign(measure, *pair) for pair in _pairs(*results[suite])] for suite in comparisons]
            gained, lost = sum(s.count(1) for s in strata), sum(s.count(-1) for s in strata)
            p_value, bootstrap = mcnemar_exact(gained, lost), paired_bootstrap(strata)
            total = replace(total, gained=gained, lost=lost, p_value=p_value, bootstrap=bootstrap)
        differences += [*rows, total]
    return SuitesComparison(first.policy, first.baseline, first.mode, tuple(differing), tuple(differences), ())


def _pairs(own: EvalResult, base: EvalResult) -> list[tuple[EpisodeOutcome, EpisodeOutcome]]:
    """Pairs of episodes with the same task and initial state."""
    others = {(e.task_id, e.init_state_id): e for e in base.episodes}
    return [(e, others[e.task_id, e.init_state_id]) for e in own.episodes if (e.task_id, e.init_state_id) in others]


def _sign(measure: str, own: EpisodeOutcome, base: EpisodeOutcome) -> int:
    """1 if only the policy succeeded, -1 if only the baseline did, else 0."""
    return int(getattr(own, measure)) - int(getattr(base, measure))


def _paired(task: str, measure: str, pairs: Sequence[tuple[EpisodeOutcome, EpisodeOutcome]]) -> Difference | None:
    if not pairs:
        return None  # no common episodes in this task
    signs = [_sign(measure, own, base) for own, base in pairs]
    gained, lost = signs.count(1), signs.count(-1)
    low, high = tango_interval(gained, lost, len(signs))
    p_value, bootstrap = mcnemar_exact(gained, lost), paired_bootstrap([signs])
    return Difference(task, measure, len(pairs), sum(signs) / len(pairs), low, high, gained, lost, p_value, bootstrap)


def _clustered(
    task: str,
    measure: str,
    pairs: Sequence[tuple[EpisodeOutcome, EpisodeOutcome]],
    cluster: Callable[[EpisodeOutcome], Hashable],
) -> Difference | None:
    """Difference over pairs that are independent only across clusters."""
    if not pairs:
        return None
    signs: dict[Hashable, list[int]] = {}
    for own, base in pairs:
        signs.setdefault(cluster(own), []).append(_sign(measure, own, base))
    clusters = [(of_one.count(1), of_one.count(-1), len(of_one)) for of_one in signs.values()]
    gained, lost = sum(c[0] for c in clusters), sum(c[1] for c in clusters)
    low, high = clustered_tango_interval(clusters)
    return Difference(task, measure, len(pairs), (gained - lost) / len(pairs), low, high, gained, lost)


def _unpaired(
    task: str, ids: frozenset[int], measure: str, result: EvalResult, base_result: EvalResult
) -> Difference | None:
    rates = []
    for side in (result, base_result):
        entries: Sequence[Any] = [side] if task == "all" else [t for t in side.tasks if {t.task_id} == ids]
        if not entries:
            return None  # the baseline lacks this task, or it is a category
        rates.append(getattr(entries[0], measure))
    own, base = rates
    low, high = newcombe_interval(round(own.rate * own.n), own.n, round(base.rate * base.n), base.n)
    return Difference(task, measure, min(own.n, base.n), own.rate - base.rate, low, high)

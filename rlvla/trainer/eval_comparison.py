"""Two policies on the same initial states: paired differences with score intervals, exact McNemar test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlvla.trainer.evaluation import EpisodeOutcome, EvalResult
from rlvla.utils.logging import table
from rlvla.utils.statistics import (
    mcnemar_exact,
    mean_interval,
    newcombe_interval,
    paired_bootstrap,
    tango_interval,
)

MEASURES = ("success_at_end", "success_once")


@dataclass(frozen=True)
class Difference:
    """How much more often a policy succeeds than its baseline.

    Attributes:
        task: name of the task, or "all"; over several suites the name of the suite, or "mean of suites".
        measure: "success_at_end" or "success_once".
        n: pairs of episodes (unpaired: episodes of the smaller side).
        difference: rate of the policy minus rate of the baseline.
        low, high: 95 % score interval: Tango's for pairs, Newcombe's for independent samples where there are none; for
            a mean of suites joined from theirs.
        gained: pairs in which only the policy succeeded; None where unpaired.
        lost: pairs in which only the baseline succeeded; None where unpaired.
        p_value: two-sided exact McNemar test; None where unpaired.
        bootstrap: 95 % interval of the paired bootstrap; None where unpaired, and where too few pairs differ.
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


@dataclass(frozen=True)
class Comparison:
    """A policy against a baseline, in one mode.

    Attributes:
        policy, baseline: their folders.
        mode: "greedy" or "sampled".
        protocol_differences: in what the two evaluations differ; empty where they are paired.
        differences: per measure and task, "all" last.
        lost_states: (task id, initial state id) of the episodes that only the baseline ended with success.
    """

    policy: str
    baseline: str
    mode: str
    protocol_differences: tuple[str, ...]
    differences: tuple[Difference, ...]
    lost_states: tuple[tuple[int, int], ...]

    HEADERS = ("task", "measure", "n", "difference [95 %]", "gained", "lost", "p")

    @property
    def paired(self) -> bool:
        """Whether both met the same episodes."""
        return not self.protocol_differences

    def overall(self, measure: str = MEASURES[0]) -> Difference:
        """Over all tasks."""
        return [d for d in self.differences if d.measure == measure][-1]

    def rows(self) -> list[tuple[Any, ...]]:
        """For a table with `HEADERS`; percentage points."""
        return [
            (
                d.task,
                d.measure.replace("_", " "),
                d.n,
                f"{100 * d.difference:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]",
                "-" if d.gained is None else d.gained,
                "-" if d.lost is None else d.lost,
                "-" if d.p_value is None else f"{d.p_value:.2g}",
            )
            for d in self.differences
        ]

    def heading(self) -> str:
        """What is compared with what."""
        return f"{self.policy} minus {self.baseline} ({self.mode}, percentage points)"

    def note(self) -> str:
        """How the intervals were obtained, and in what the protocols differ."""
        if self.paired:
            return "paired on the same initial states: 95 % score interval (Tango), exact McNemar test"
        differing = "; ".join(self.protocol_differences)
        return f"THE PROTOCOLS DIFFER, so this is no paired comparison (Newcombe interval, no test): {differing}"

    def as_table(self) -> str:
        """For the terminal."""
        return f"{self.heading()}\n{table(self.HEADERS, self.rows())}\n({self.note()})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"paired": self.paired}


def compare(
    policy: str,
    result: EvalResult,
    baseline: str,
    base_result: EvalResult,
    protocol_differences: Sequence[str] = (),
) -> Comparison:
    """Compare two evaluations of the same mode.

    Args:
        policy: its name.
        result: what it did.
        baseline: the name of what it is compared with.
        base_result: what that did.
        protocol_differences: see `describe_differences`; where there are any, nothing is paired.
    """
    names = {task.task_id: task.name for task in result.tasks}
    pairs = _pairs(result, base_result)
    if not pairs and not protocol_differences:
        protocol_differences = ["no initial state from which both could be played"]
    scopes: list[tuple[str, int | None]] = [(name, i) for i, name in names.items()] if len(names) > 1 else []
    scopes += [("all", None)]
    found: list[Difference | None] = []
    for measure in MEASURES:
        for task, task_id in scopes:
            if protocol_differences:
                found.append(_unpaired(task, task_id, measure, result, base_result))
            else:
                found.append(_paired(task, measure, [pair for pair in pairs if task_id in (None, pair[0].task_id)]))
    lost = [(own.task_id, own.init_state_id) for own, base in pairs if _sign(MEASURES[0], own, base) < 0]
    kept = tuple(d for d in found if d is not None)
    return Comparison(
        policy, baseline, result.mode, tuple(protocol_differences), kept, () if protocol_differences else tuple(lost)
    )


@dataclass(frozen=True)
class SuitesComparison(Comparison):
    """A policy against a baseline over several suites, which have the same weight however many tasks they have."""

    HEADERS = ("suite", *Comparison.HEADERS[1:])

    def heading(self) -> str:
        """What is compared with what."""
        return f"all suites: {super().heading()}"

    def note(self) -> str:
        """How the intervals were obtained, and in what the protocols differ."""
        return super().note() + "; in the mean every suite has the same weight, and the intervals are joined (MOVER)"


MEAN_OF_SUITES = "mean of suites"


def compare_over_suites(
    comparisons: Mapping[str, Comparison], results: Mapping[str, tuple[EvalResult, EvalResult]]
) -> SuitesComparison:
    """Join the comparisons of one mode in each of several suites.

    The mean's interval is joined from those of the suites; its test is McNemar's on the pairs of all suites. Where a
    suite has no pairs, there is no test.

    Args:
        comparisons: by suite.
        results: by suite, what the policy and what the baseline did.
    """
    first = next(iter(comparisons.values()))
    differing = [f"{suite}: {phrase}" for suite, c in comparisons.items() for phrase in c.protocol_differences]
    found: list[Difference] = []
    for measure in MEASURES:
        rows = [replace(c.overall(measure), task=suite) for suite, c in comparisons.items()]
        mean, low, high = mean_interval([(d.difference, d.low, d.high) for d in rows])
        total = Difference(MEAN_OF_SUITES, measure, sum(d.n for d in rows), mean, low, high)
        if not differing:
            strata = [[_sign(measure, *pair) for pair in _pairs(*results[suite])] for suite in comparisons]
            gained, lost = sum(s.count(1) for s in strata), sum(s.count(-1) for s in strata)
            p_value, bootstrap = mcnemar_exact(gained, lost), paired_bootstrap(strata)
            total = replace(total, gained=gained, lost=lost, p_value=p_value, bootstrap=bootstrap)
        found += [*rows, total]
    return SuitesComparison(first.policy, first.baseline, first.mode, tuple(differing), tuple(found), ())


def _pairs(own: EvalResult, base: EvalResult) -> list[tuple[EpisodeOutcome, EpisodeOutcome]]:
    """Episodes of the same task and initial state."""
    others = {(e.task_id, e.init_state_id): e for e in base.episodes}
    return [(e, others[e.task_id, e.init_state_id]) for e in own.episodes if (e.task_id, e.init_state_id) in others]


def _sign(measure: str, own: EpisodeOutcome, base: EpisodeOutcome) -> int:
    """1 where only the policy succeeded, -1 where only the baseline did."""
    return int(getattr(own, measure)) - int(getattr(base, measure))


def _paired(task: str, measure: str, pairs: Sequence[tuple[EpisodeOutcome, EpisodeOutcome]]) -> Difference | None:
    if not pairs:
        return None  # of this task each side lacks what the other has
    signs = [_sign(measure, own, base) for own, base in pairs]
    gained, lost = signs.count(1), signs.count(-1)
    low, high = tango_interval(gained, lost, len(signs))
    p_value, bootstrap = mcnemar_exact(gained, lost), paired_bootstrap([signs])
    return Difference(task, measure, len(pairs), sum(signs) / len(pairs), low, high, gained, lost, p_value, bootstrap)


def _unpaired(
    task: str, task_id: int | None, measure: str, result: EvalResult, base_result: EvalResult
) -> Difference | None:
    rates = []
    for side in (result, base_result):
        entries = [side] if task_id is None else [t for t in side.tasks if t.task_id == task_id]
        if not entries:
            return None  # the baseline does not have this task
        rates.append(getattr(entries[0], measure))
    own, base = rates
    low, high = newcombe_interval(round(own.rate * own.n), own.n, round(base.rate * base.n), base.n)
    return Difference(task, measure, min(own.n, base.n), own.rate - base.rate, low, high)


def describe_differences(own: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """In what two protocols (`eval_run.describe_protocol`) differ, one phrase each."""
    found = []
    for name in ("suite", "name", "seed", "temperature", "success_hold_steps"):
        if own.get(name) != base.get(name):
            found.append(f"{name} {own.get(name)} and {base.get(name)}")
    tasks = [{task["task_id"]: task for task in side.get("tasks", [])} for side in (own, base)]
    if list(tasks[0]) != list(tasks[1]):
        found.append(f"tasks {sorted(tasks[0])} and {sorted(tasks[1])}")
    for task_id in [i for i in tasks[0] if i in tasks[1]]:
        mine, theirs = tasks[0][task_id], tasks[1][task_id]
        for name in ("max_steps", "control_freq"):
            if mine[name] != theirs[name]:
                found.append(f"{name} of {mine['name']} {mine[name]:g} and {theirs[name]:g}")
        if mine["init_states"] != theirs["init_states"]:
            counts = f"{len(mine['init_states'])} and {len(theirs['init_states'])}"
            found.append(f"initial states of {mine['name']} ({counts})")
    return found

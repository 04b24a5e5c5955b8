"""What an evaluation found in each of its suites, and the mean over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlvla.trainer.eval_comparison import (
    MEAN_OF_SUITES,
    Comparison,
    SuitesComparison,
    compare,
    compare_over_suites,
    describe_differences,
)
from rlvla.trainer.eval_record import PolicyEvaluation
from rlvla.trainer.evaluation import EvalResult, Rate
from rlvla.utils.logging import table


@dataclass(frozen=True)
class SuiteEvaluation:
    """A policy and its baselines in one suite.

    Attributes:
        own: the policy.
        baselines: what it is compared with, in the order of the command line.
        compared: (position of the baseline, mode) -> the policy against it, for modes that both were evaluated in.
    """

    own: PolicyEvaluation
    baselines: tuple[PolicyEvaluation, ...]
    compared: Mapping[tuple[int, str], Comparison]

    @classmethod
    def of(cls, own: PolicyEvaluation, baselines: Sequence[PolicyEvaluation] = ()) -> SuiteEvaluation:
        """Compare the policy with every baseline."""
        compared = {}
        for position, base in enumerate(baselines):
            for result in own.results:
                other = base.result(result.mode)
                if other is not None:
                    differing = describe_differences(own.protocols[result.mode], base.protocols[result.mode])
                    found = compare(own.policy, result, base.policy, other, differing)
                    compared[position, result.mode] = found
        return cls(own, tuple(baselines), compared)

    @property
    def everyone(self) -> tuple[PolicyEvaluation, ...]:
        """The policy first."""
        return (self.own, *self.baselines)

    @property
    def comparisons(self) -> list[Comparison]:
        """Baseline by baseline."""
        return list(self.compared.values())

    def results_of(self, position: int, mode: str) -> tuple[EvalResult, EvalResult]:
        """The figures behind one of `compared`: the policy's and the baseline's."""
        own, base = self.own.result(mode), self.baselines[position].result(mode)
        assert own is not None and base is not None
        return own, base

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        content = self.own.as_dict()
        if self.baselines:
            content["baselines"] = [base.as_dict() for base in self.baselines]
            content["comparisons"] = [comparison.as_dict() for comparison in self.comparisons]
        return content


@dataclass(frozen=True)
class SuitesResult:
    """One policy in one mode over several suites.

    Attributes:
        position: 0 for the policy, from 1 on its baselines.
        policy: its folder.
        mode: "greedy" or "sampled".
        results: by suite.
    """

    position: int
    policy: str
    mode: str
    results: Mapping[str, EvalResult]

    HEADERS = ("suite", *EvalResult.HEADERS[1:])

    @property
    def success_at_end(self) -> Rate:
        """Mean over suites."""
        return Rate.mean([result.success_at_end for result in self.results.values()])

    @property
    def success_once(self) -> Rate:
        """Mean over suites."""
        return Rate.mean([result.success_once for result in self.results.values()])

    @property
    def mean_length(self) -> float:
        """Environment steps per episode, mean over suites."""
        return sum(result.mean_length for result in self.results.values()) / len(self.results)

    @property
    def regressions(self) -> float:
        """How often success was lost again per episode, mean over suites."""
        return sum(result.regressions for result in self.results.values()) / len(self.results)

    @property
    def dropped(self) -> int:
        """Episodes that could not be played."""
        return sum(result.dropped for result in self.results.values())

    def rows(self) -> list[tuple[str, int, str, str, str, str]]:
        """Cells for `HEADERS`, suite by suite, the mean last."""
        entries: list[tuple[str, EvalResult | SuitesResult]] = [*self.results.items(), (MEAN_OF_SUITES, self)]
        return [
            (
                name,
                entry.success_at_end.n,
                str(entry.success_at_end),
                str(entry.success_once),
                f"{entry.mean_length:.1f}",
                f"{entry.regressions:.2f}",
            )
            for name, entry in entries
        ]

    def note(self) -> str:
        """How the mean was formed, and what is missing in it."""
        dropped = f"; {self.dropped} EPISODES COULD NOT BE PLAYED and are in no figure" if self.dropped else ""
        return f"every suite has the same weight in the mean; its 95 % interval is joined from theirs (MOVER){dropped}"

    def as_table(self) -> str:
        """For the terminal."""
        return f"{self.policy}, all suites\n{table(self.HEADERS, self.rows())}\n({self.mode}; {self.note()})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": self.policy,
            "mode": self.mode,
            "success_at_end": asdict(self.success_at_end),
            "success_once": asdict(self.success_once),
            "mean_length": self.mean_length,
            "regressions": self.regressions,
            "dropped": self.dropped,
        }


@dataclass(frozen=True)
class Findings:
    """Everything that an evaluation found.

    Attributes:
        suites: by name, in the order of the command line.
        results: every policy in every mode over all suites, the policy before its baselines; () for a single suite.
        comparisons: the policy against its baselines over all suites; () for a single suite.
    """

    suites: Mapping[str, SuiteEvaluation]
    results: tuple[SuitesResult, ...]
    comparisons: tuple[SuitesComparison, ...]

    @classmethod
    def of(cls, suites: Mapping[str, SuiteEvaluation]) -> Findings:
        """Join the suites; what one of them lacks (a mode of an earlier result) is not joined."""
        if len(suites) == 1:
            return cls(suites, (), ())
        return cls(suites, tuple(_results(suites)), tuple(_comparisons(suites)))

    @property
    def first(self) -> SuiteEvaluation:
        """The first suite, of many or one."""
        return next(iter(self.suites.values()))

    @property
    def versions(self) -> dict[str, str]:
        """Of the packages and simulators of all suites."""
        return {name: number for suite in self.suites.values() for name, number in suite.own.versions.items()}


def _results(suites: Mapping[str, SuiteEvaluation]) -> Iterator[SuitesResult]:
    for position, evaluations in enumerate(zip(*(suite.everyone for suite in suites.values()))):
        for mode in dict.fromkeys(result.mode for result in evaluations[0].results):
            results = {name: e.result(mode) for name, e in zip(suites, evaluations)}
            whole = {name: result for name, result in results.items() if result is not None}
            if len(whole) == len(suites):
                yield SuitesResult(position, evaluations[0].policy, mode, whole)


def _comparisons(suites: Mapping[str, SuiteEvaluation]) -> Iterator[SuitesComparison]:
    for position, mode in next(iter(suites.values())).compared:
        compared = {name: s.compared[position, mode] for name, s in suites.items() if (position, mode) in s.compared}
        if len(compared) == len(suites):
            results = {name: s.results_of(position, mode) for name, s in suites.items()}
            yield compare_over_suites(compared, results)

"""Evaluation of policies and baselines over suites, and its JSON and Markdown files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from rlvla.envs.config import EnvConfig
from rlvla.envs.registry import is_known
from rlvla.evaluation.comparison import MEAN_OF_SUITES, Comparison, SuitesComparison, compare, compare_over_suites
from rlvla.evaluation.protocol import condition_labels, describe_differences
from rlvla.evaluation.results import EvalResult, Rate, TaskResult, table_row
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import json_text, write_atomic, write_json
from rlvla.utils.terminal import log, markdown_table, markdown_text, table
from rlvla.version import __version__

SUITES_KEY = "suites"  # in JSON files of several suites: name -> content as for a single suite
_VERSIONED = ("torch", "numpy", "transformers", "deepspeed")


@dataclass
class PolicyEvaluation:
    """Evaluation of one policy in one or two modes.

    Attributes:
        policy: checkpoint folder.
        environment: environment and observations (`EnvConfig.as_dict`).
        protocols: mode -> `describe_protocol`.
        results: one per mode.
        videos: mode -> video files.
        versions: package versions used for the evaluation.
        trained_on: description of its training states (`describe_learned_from`).
    """

    policy: str
    environment: dict[str, Any]
    protocols: dict[str, dict[str, Any]]
    results: list[EvalResult]
    videos: dict[str, list[Path]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: package_versions())
    trained_on: str = ""

    def result(self, mode: str) -> EvalResult | None:
        """The results in a mode, or None."""
        return next((result for result in self.results if result.mode == mode), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return {
            "policy": self.policy,
            "environment": self.environment,
            "seed": next(iter(self.protocols.values()))["seed"],
            "temperature": next((p["temperature"] for p in self.protocols.values() if "temperature" in p), None),
            "versions": self.versions,
            "trained_on": self.trained_on,
            "protocols": self.protocols,
            "videos": {mode: [str(path) for path in paths] for mode, paths in self.videos.items()},
            "results": [result.as_dict() for result in self.results],
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> PolicyEvaluation:
        """The inverse of `as_dict`; protocols without `options` (older files) take them from the environment."""
        protocols, env = content["protocols"], EnvConfig().completed(content["environment"])
        if env.task_suite_name is not None and is_known(env.task_suite_name):
            protocols = {mode: {"options": env.played_options} | p for mode, p in protocols.items()}
        return cls(
            policy=content["policy"],
            environment=content["environment"],
            protocols=protocols,
            results=[EvalResult.from_dict(result) for result in content["results"]],
            videos={mode: [Path(p) for p in paths] for mode, paths in content.get("videos", {}).items()},
            versions=content.get("versions", {}),
            trained_on=content.get("trained_on", ""),
        )

    @property
    def suite(self) -> str:
        """Name of the suite."""
        return next(iter(self.protocols.values()))["suite"]

    @classmethod
    def read(cls, path: Path, suite: str | None = None) -> PolicyEvaluation:
        """Read a JSON file of `cli/eval_vla.py`, or one `suite` of it.

        ConfigError if the file is invalid, or lacks the suite or the episodes. Videos elsewhere are left out.
        """
        try:
            content = read_json(path, allow_nan=True)
            several = content.get(SUITES_KEY)
            if several is not None and suite not in several:
                raise ConfigError(f"{path} holds {', '.join(several)}, not {suite}; evaluate both in the same suites")
            evaluation = cls.from_dict(content if several is None else several[suite])
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is not the result of an evaluation ({type(error).__name__}: {error}); make one with "
                "cli/eval_vla.py"
            ) from error
        if not evaluation.results or not all(result.episodes for result in evaluation.results):
            raise ConfigError(f"{path} does not hold the single episodes; evaluate {evaluation.policy} again")
        # A file from elsewhere shows no other files of this machine: videos lie below its folder.
        folder = path.parent.resolve()
        videos = {
            mode: [video for video in paths if video.suffix == ".mp4" and video.resolve().is_relative_to(folder)]
            for mode, paths in evaluation.videos.items()
        }
        return replace(evaluation, videos=videos)


def package_versions(simulator: Mapping[str, str] | None = None) -> dict[str, str]:
    """Versions of rlvla, of installed packages that results depend on, and of the simulator."""
    versions = {"rlvla": __version__}
    for name in _VERSIONED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions | dict(simulator or {})


@dataclass(frozen=True)
class SuiteEvaluation:
    """Evaluation of a policy and its baselines in one suite.

    Attributes:
        own: the policy.
        baselines: baselines in command-line order.
        compared: (index of the baseline, mode) -> comparison, for modes that both were evaluated in.
    """

    own: PolicyEvaluation
    baselines: tuple[PolicyEvaluation, ...]
    compared: Mapping[tuple[int, str], Comparison]

    @classmethod
    def of(cls, own: PolicyEvaluation, baselines: Sequence[PolicyEvaluation] = ()) -> SuiteEvaluation:
        """Compare the policy with all baselines."""
        compared = {}
        for position, base in enumerate(baselines):
            for result in own.results:
                other = base.result(result.mode)
                if other is not None:
                    differing = describe_differences(own.protocols[result.mode], base.protocols[result.mode])
                    comparison = compare(own.policy, result, base.policy, other, differing)
                    compared[position, result.mode] = comparison
        return cls(own, tuple(baselines), compared)

    @property
    def everyone(self) -> tuple[PolicyEvaluation, ...]:
        """The policy, followed by its baselines."""
        return (self.own, *self.baselines)

    def rates(self, group: str) -> dict[tuple[int, str], Rate]:
        """Success at end over "all" tasks or an entry of `EvalResult.task_groups`.

        Returns:
            (position in `everyone`, mode) -> rate, for policies that played any of these tasks.
        """
        ids = self.own.results[0].task_groups.get(group)
        rates = {}
        for position, evaluation in enumerate(self.everyone):
            for result in evaluation.results:
                if ids is None:
                    rates[position, result.mode] = result.success_at_end
                elif any(task.task_id in ids for task in result.tasks):
                    rates[position, result.mode] = result.of_tasks(group, ids).success_at_end
        return rates

    @property
    def comparisons(self) -> list[Comparison]:
        """All comparisons, ordered by baseline."""
        return list(self.compared.values())

    def results_of(self, position: int, mode: str) -> tuple[EvalResult, EvalResult]:
        """Results of the policy and of the baseline of an entry of `compared`."""
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
    """Results of one policy in one mode over several suites.

    Attributes:
        position: 0 for the policy, 1 and up for its baselines.
        policy: checkpoint folder.
        mode: "greedy" or "sampled".
        results: suite -> results.
    """

    position: int
    policy: str
    mode: str
    results: Mapping[str, EvalResult]

    HEADERS = ("suite", *EvalResult.HEADERS[1:])

    @cached_property
    def mean(self) -> TaskResult:
        """Mean over suites."""
        results = list(self.results.values())
        return TaskResult(
            task_id=-1,
            name=MEAN_OF_SUITES,
            success_at_end=Rate.mean([result.success_at_end for result in results]),
            success_once=Rate.mean([result.success_once for result in results]),
            mean_length=sum(result.mean_length for result in results) / len(results),
            regressions=sum(result.regressions for result in results) / len(results),
        )

    @property
    def success_at_end(self) -> Rate:
        """Mean over suites."""
        return self.mean.success_at_end

    @property
    def dropped(self) -> int:
        """Number of episodes that could not be played."""
        return sum(result.dropped for result in self.results.values())

    def rows(self) -> list[tuple[str, int, str, str, str, str]]:
        """Table rows for `HEADERS`, one per suite, the mean last."""
        return [
            *(table_row(name, result) for name, result in self.results.items()),
            table_row(MEAN_OF_SUITES, self.mean),
        ]

    def note(self) -> str:
        """Note on the mean and on dropped episodes."""
        dropped = f"; {self.dropped} EPISODES COULD NOT BE PLAYED and are in no figure" if self.dropped else ""
        detector = next(iter(self.results.values())).success_detector
        return (
            f"{detector}; suites have equal weights in the mean, whose 95 % interval combines theirs (MOVER){dropped}"
        )

    def as_table(self) -> str:
        """For the terminal."""
        return f"{self.policy}, all suites\n{table(self.HEADERS, self.rows())}\n({self.mode}; {self.note()})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": self.policy,
            "mode": self.mode,
            "success_at_end": asdict(self.success_at_end),
            "success_once": asdict(self.mean.success_once),
            "mean_length": self.mean.mean_length,
            "regressions": self.mean.regressions,
            "dropped": self.dropped,
            "success_source": next(iter(self.results.values())).success_source,
        }


@dataclass(frozen=True)
class EvaluationReport:
    """All results of an evaluation.

    Attributes:
        suites: suite -> evaluation, in command-line order.
        results: results over all suites per policy and mode, the policy before its baselines; () for one suite, and for
            conditions of one.
        comparisons: comparisons over all suites; likewise.
    """

    suites: Mapping[str, SuiteEvaluation]
    results: tuple[SuitesResult, ...]
    comparisons: tuple[SuitesComparison, ...]

    @classmethod
    def of(cls, suites: Mapping[str, SuiteEvaluation]) -> EvaluationReport:
        """Combine suites; modes or comparisons that are missing in any suite are left out.

        Conditions of one suite share their initial states: they are not pooled.
        """
        if len({suite.own.suite for suite in suites.values()}) < len(suites) or len(suites) == 1:
            return cls(suites, (), ())
        return cls(suites, tuple(_results_over_suites(suites)), tuple(_comparisons_over_suites(suites)))

    @property
    def conditions(self) -> list[tuple[str, ...]]:
        """Success at end by condition: a header and a row for each condition; [] unless conditions are not pooled.

        A row has the success of all policies, and the paired differences of the policy to its baselines in points.
        Where the policy was trained on some of the tasks only, rows of seen and unseen tasks follow.
        """
        if self.results or len(self.suites) == 1:
            return []
        columns = list(self.first.rates("all"))
        names = [f"{self.first.everyone[position].policy}, {mode}" for position, mode in columns]
        compared = list(self.first.compared)
        names += [f"difference to {self.first.baselines[position].policy}, {mode}" for position, mode in compared]
        rows = []
        for name, suite in self.suites.items():
            for group in ("all", *suite.own.results[0].task_groups):
                rates = suite.rates(group)
                cells = [str(rates.get(column, "-")) for column in columns]
                for key in compared:
                    comparison = suite.compared.get(key)
                    difference = None if comparison is None else comparison.of_task(group)
                    cells.append("-" if difference is None else difference.in_points())
                rows.append((name if group == "all" else f"{name}: {group}", *cells))
        return [("condition", *names), *rows]

    @property
    def categories(self) -> list[tuple[str, ...]]:
        """Success at end by `TaskSpec.category` over all suites: a header and a row for each; [] without categories.

        Intervals are over tasks. Every task counts once, so there is none for conditions of a suite.
        """
        if self.conditions:
            return []
        names = dict.fromkeys(task.category for suite in self.suites.values() for task in suite.own.results[0].tasks)
        if not any(names):
            return []
        columns = [(p, m) for p, policy in enumerate(self.first.everyone) for m in range(len(policy.results))]
        rows = []
        for name in names:
            clusters = [self._by_task(name, *column) for column in columns]
            counts = str(len(clusters[0])), str(sum(map(len, clusters[0])))
            rows.append((name or "-", *counts, *(str(Rate.of_clusters(c)) if c else "-" for c in clusters)))
        header = [f"{e.policy}, {result.mode}" for e in self.first.everyone for result in e.results]
        return [("category", "tasks", "episodes", *header), *rows]

    def _by_task(self, category: str, policy: int, mode: int) -> list[list[bool]]:
        """Success at end of the episodes of each task of a category."""
        results = [suite.everyone[policy].results[mode] for suite in self.suites.values()]
        return [
            [e.success_at_end for e in result.episodes if e.task_id == task.task_id]
            for result in results
            for task in result.tasks
            if task.category == category
        ]

    @property
    def first(self) -> SuiteEvaluation:
        """The first suite."""
        return next(iter(self.suites.values()))

    @property
    def versions(self) -> dict[str, str]:
        """Package and simulator versions over all suites."""
        return {name: number for suite in self.suites.values() for name, number in suite.own.versions.items()}


def _results_over_suites(suites: Mapping[str, SuiteEvaluation]) -> Iterator[SuitesResult]:
    for position, evaluations in enumerate(zip(*(suite.everyone for suite in suites.values()))):
        for mode in dict.fromkeys(result.mode for result in evaluations[0].results):
            results = {name: e.result(mode) for name, e in zip(suites, evaluations)}
            whole = {name: result for name, result in results.items() if result is not None}
            if len(whole) == len(suites):
                yield SuitesResult(position, evaluations[0].policy, mode, whole)


def _comparisons_over_suites(suites: Mapping[str, SuiteEvaluation]) -> Iterator[SuitesComparison]:
    for position, mode in next(iter(suites.values())).compared:
        compared = {name: s.compared[position, mode] for name, s in suites.items() if (position, mode) in s.compared}
        if len(compared) == len(suites):
            results = {name: s.results_of(position, mode) for name, s in suites.items()}
            yield compare_over_suites(compared, results)


def write_figures(output: Path, report: EvaluationReport) -> Path:
    """Write the JSON file and a Markdown file next to it; returns the path of the latter.

    Existing results are kept under the next free number: `eval.json` becomes `eval_1.json`.
    """
    content = as_json(report)
    _keep_earlier(output, content)
    write_json(output, content)
    markdown = output.with_suffix(".md")
    write_atomic(markdown, as_markdown(report).encode())
    return markdown


def _keep_earlier(output: Path, content: dict[str, Any]) -> None:
    """Rename existing results that differ from the new ones."""
    if not output.exists() or output.read_text(encoding="utf-8") == json_text(content):
        return
    numbered = (output.with_stem(f"{output.stem}_{number}") for number in count(1))
    kept = next(path for path in numbered if not path.exists())
    for suffix in (output.suffix, ".md"):
        earlier = output.with_suffix(suffix)
        if earlier.exists():
            earlier.rename(kept.with_suffix(suffix))
    log.info("earlier results are kept: %s", kept)


def as_json(report: EvaluationReport) -> dict[str, Any]:
    """The content of the JSON file.

    For one suite its policy, baselines and comparisons; for several suites the same per suite under `suites`, and
    results over all suites under `mean_of_suites` and `comparisons`.
    """
    first = report.first
    if len(report.suites) == 1:
        return first.as_dict()
    return {
        "policy": first.own.policy,
        "mean_of_suites": [result.as_dict() for result in report.results],
        "comparisons": [comparison.as_dict() for comparison in report.comparisons],
        SUITES_KEY: {name: suite.as_dict() for name, suite in report.suites.items()},
    }


def as_markdown(report: EvaluationReport) -> str:
    """All tables as Markdown; the tables over all suites come first."""
    blocks = []
    for overall in report.results:
        heading = f"{overall.policy}, {overall.mode}, all suites"
        blocks += _section(heading, overall.note(), overall.HEADERS, overall.rows())
    if report.conditions:
        blocks += ["## Success at end by condition", markdown_table(report.conditions[0], report.conditions[1:])]
    if report.categories:
        title = "## Success at end by category, 95 % intervals over tasks"
        blocks += [title, markdown_table(report.categories[0], report.categories[1:])]
    for overall_comparison in report.comparisons:
        blocks += _comparison_section(overall_comparison)
    for name, suite in report.suites.items():
        where = f"{name}: " if len(report.suites) > 1 else ""
        for evaluation in suite.everyone:
            for result in evaluation.results:
                protocol = evaluation.protocols[result.mode]
                labels = "".join(f"{label}; " for label in condition_labels(protocol))
                trained_on = markdown_text(evaluation.trained_on) + "; " if evaluation.trained_on else ""
                intervals = result.about_samples or f"95 % {result.kind_of_intervals}"
                dropped = f" **{result.dropped} episodes could not be played.**" if result.dropped else ""
                dropped += f" **{markdown_text(result.about_failures)}**" if result.about_failures else ""
                blocks += [
                    f"## {markdown_text(where + evaluation.policy)}, {result.mode}",
                    f"Protocol {markdown_text(result.protocol)}, seed {protocol['seed']}; {labels}"
                    f"{trained_on}{result.success_detector}; {intervals}.{dropped}",
                    markdown_table(result.HEADERS, result.rows()),
                ]
                agreement, source = result.agreement, result.success_source
                if agreement is not None:
                    blocks.append(markdown_table(agreement.headers(source), agreement.rows(source)))
        for comparison in suite.comparisons:
            blocks += _comparison_section(comparison, where)
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    blocks.append(f"Measured with {markdown_text(versions)}.")
    return "\n\n".join(blocks) + "\n"


def _comparison_section(comparison: Comparison, where: str = "") -> list[str]:
    return _section(where + comparison.heading(), comparison.note(), comparison.HEADERS, comparison.rows())


def _section(heading: str, note: str, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [
        f"## {markdown_text(heading)}",
        f"{markdown_text(note[0].upper() + note[1:])}.",
        markdown_table(headers, rows),
    ]

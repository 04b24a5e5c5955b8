"""HTML report of an evaluation, with charts and videos."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvla.checkpoints.run_folder import RUN_FILE, TOTALS_FILE
from rlvla.evaluation.comparison import MEAN_OF_SUITES
from rlvla.evaluation.findings import EvaluationReport, PolicyEvaluation, SuiteEvaluation, SuitesResult
from rlvla.evaluation.learning_charts import learning_charts
from rlvla.evaluation.pages import labels, render
from rlvla.evaluation.results import EvalResult
from rlvla.evaluation.shown_videos import shown_videos
from rlvla.evaluation.states import StateGrid, solved, won_and_lost
from rlvla.utils.cli.config_file import command_line
from rlvla.utils.files import read_metrics, write_atomic

REPORT_FILE = "report.html"
_RUN_FILES = (RUN_FILE, TOTALS_FILE)  # files of the training run of the policy


def write_report(folder: Path, findings: EvaluationReport, stages: Sequence[Sequence[str]] = ()) -> Path:
    """Write `report.html` into `folder` and return its path.

    Learning curves and configuration are read from the run folder of the policy, if any; videos are embedded.

    Args:
        folder: output folder, created if missing.
        findings: results of the evaluation.
        stages: of the recipe that led to the policy: name, duration, flags of the command.
    """
    path = folder / REPORT_FILE
    write_atomic(path, render_report(findings, stages).encode(errors="replace"))
    return path


def render_report(findings: EvaluationReport, stages: Sequence[Sequence[str]] = ()) -> str:
    """Render the report as HTML; arguments as in `write_report`."""
    suites, own = findings.suites, findings.first.own
    run_folder = Path(own.policy).parent
    heads: Sequence[Any] = [result for result in findings.results if result.position == 0] or own.results
    names = labels(evaluation.policy for evaluation in findings.first.everyone)
    return render(
        "report.html.jinja",
        title=f"{names[own.policy]}: {heads[0].success_at_end}",
        label=lambda policy: names.get(policy, policy),
        own=own,
        names=", ".join(suites),
        seed=next(iter(own.protocols.values()))["seed"],
        heads=heads,
        head_comparisons=findings.comparisons or findings.first.comparisons,
        conditions=findings.conditions,
        categories=findings.categories,
        over_all={
            "results": findings.results,
            "bars": _bars_of_suites(findings.results),
            "comparisons": findings.comparisons,
        },
        suites=[
            {
                "of": f"{name}: " if len(suites) > 1 else "",
                "bars": _bars(suite.own, suite.baselines),
                "comparisons": suite.comparisons,
                "everyone": suite.everyone,
                "grids": _grids(suite, names),
                "videos": shown_videos(suite.everyone, names),
            }
            for name, suite in suites.items()
        ],
        charts=learning_charts(read_metrics(run_folder)),
        configurations=_configurations(suites, run_folder),
        versions=findings.versions,
        stages=stages,
        percent=lambda rate: f"{100 * rate:.1f} %",
        points=lambda difference: f"{100 * difference:+.1f}",
    )


def _grids(suite: SuiteEvaluation, names: Mapping[str, str]) -> list[tuple[str, StateGrid]]:
    """Headings and grids of the states: against each baseline whose episodes are paired, else those of the policy."""
    if not suite.baselines:
        grids = [(f"States solved, {result.mode}", solved(result)) for result in suite.own.results]
        return [(heading, grid) for heading, grid in grids if grid is not None]
    found = []
    for (position, mode), comparison in suite.compared.items():
        grid = won_and_lost(*suite.results_of(position, mode)) if comparison.paired else None
        if grid is not None:
            found.append((f"States won and lost against {names[comparison.baseline]}, {mode}", grid))
    return found


def _bars(own: PolicyEvaluation, baselines: Sequence[PolicyEvaluation]) -> list[dict[str, Any]]:
    """Success rates of all policies for each mode and task; missing results have no bar."""
    groups = []
    for result in own.results:
        tasks = []
        for name, ids in [*result.listed, *([("all tasks", None)] if len(result.tasks) > 1 else [])]:
            bars = []
            for evaluation in [own, *baselines]:
                other = evaluation.result(result.mode)
                entry: Any = other if other is None or ids is None else other.of_listed(name, ids)
                if entry is not None:
                    rate = entry.success_at_end
                    bars.append({"policy": evaluation.policy, "own": evaluation is own, "rate": rate})
            tasks.append({"name": name, "bars": bars})
        everyone = [evaluation.result(result.mode) for evaluation in [own, *baselines]]
        groups.append({"mode": result.mode, "tasks": tasks, "intervals": _kinds_of_intervals(everyone)})
    return groups


def _bars_of_suites(over_all: Sequence[SuitesResult]) -> list[dict[str, Any]]:
    """Success rates of all policies for each mode and suite, and the mean over suites."""
    groups = []
    for mode in dict.fromkeys(result.mode for result in over_all):
        results = [result for result in over_all if result.mode == mode]
        rows: list[tuple[str, list[Any]]] = [(name, [r.results[name] for r in results]) for name in results[0].results]
        groups.append(
            {
                "mode": mode,
                "intervals": _kinds_of_intervals([e for result in results for e in result.results.values()]),
                "tasks": [
                    {
                        "name": name,
                        "bars": [
                            {"policy": r.policy, "own": r.position == 0, "rate": e.success_at_end}
                            for r, e in zip(results, entries)
                        ],
                    }
                    for name, entries in [*rows, (MEAN_OF_SUITES, list(results))]
                ],
            }
        )
    return groups


def _kinds_of_intervals(results: Sequence[EvalResult | None]) -> str:
    return " and ".join(dict.fromkeys(result.kind_of_intervals for result in results if result is not None))


def _configurations(suites: Mapping[str, SuiteEvaluation], run_folder: Path) -> list[tuple[str, str]]:
    settings = [("command", command_line())]
    for name, suite in suites.items():
        label = f"{name}: " if len(suites) > 1 else ""
        protocols = {mode: _shortened(protocol) for mode, protocol in suite.own.protocols.items()}
        settings += [
            (f"{label}protocol", json.dumps(protocols, indent=2)),
            (f"{label}environment", json.dumps(suite.own.environment, indent=2)),
        ]
    for name in _RUN_FILES:
        if (run_folder / name).is_file():
            settings.append((f"training: {name}", (run_folder / name).read_text(encoding="utf-8")))
    return settings


def _shortened(protocol: dict[str, Any]) -> dict[str, Any]:
    """The protocol with compact lists of initial states."""
    tasks = [{**task, "init_states": _span(task["init_states"])} for task in protocol["tasks"]]
    return {**protocol, "tasks": tasks}


def _span(states: Sequence[int]) -> str:
    first, last = states[0], states[-1]
    if list(states) == list(range(first, last + 1)):
        return f"{first}..{last}"
    return " ".join(map(str, states))

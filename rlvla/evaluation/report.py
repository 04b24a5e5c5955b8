"""HTML report of an evaluation, with charts and videos."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.checkpoints.run_folder import RUN_FILE
from rlvla.evaluation.comparison import MEAN_OF_SUITES
from rlvla.evaluation.findings import EvaluationReport, PolicyEvaluation, SuiteEvaluation, SuitesResult
from rlvla.evaluation.pages import COLORS, INK, Chart, new_figure, render, svg
from rlvla.evaluation.results import EvalResult
from rlvla.evaluation.statistics import interval_of_metrics
from rlvla.rewards.base import reward_names, source_of
from rlvla.rollout.stats import OF_TASKS
from rlvla.utils.cli.config_file import command_line
from rlvla.utils.files import read_metrics, write_atomic
from rlvla.utils.video import video_size

REPORT_FILE = "report.html"
_RUN_FILES = (RUN_FILE, "totals.json")  # files of the training run of the policy
# Source that is registered only when a model is loaded.
_LATE_SOURCE = "rm_model"
_COLUMNS = 40  # of the matrix of tasks by training episodes, at most
_LABEL = 34  # letters of the name of a task there


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
    return render(
        "report.html.jinja",
        title=f"{own.policy}: {heads[0].success_at_end}",
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
                "videos": _videos(suite.everyone),
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


def _videos(evaluations: Sequence[PolicyEvaluation]) -> dict[str, list[dict[str, Any]]]:
    """Videos by policy and mode; files that no longer exist are skipped."""
    videos_of = {
        f"{evaluation.policy}, {mode}": [_video(path) for path in paths if path.is_file()]
        for evaluation in evaluations
        for mode, paths in evaluation.videos.items()
    }
    return {heading: videos for heading, videos in videos_of.items() if videos}


def _video(path: Path) -> dict[str, Any]:
    """Template variables of a video written by `record_videos`."""
    task, _, state = path.stem.rpartition("_")[0].rpartition("_state")
    size = video_size(path)
    return {
        "name": f"{task.replace('_', ' ')}, initial state {state}",
        "success": path.stem.endswith("_success"),
        "tall": None if size is None else f"{size[1] / size[0]:.4f}",
        "data": base64.b64encode(path.read_bytes()).decode(),
    }


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


def learning_charts(records: Sequence[dict[str, float]]) -> list[Chart]:
    """Success, of each task too, reward components, entropy, size of updates, gradient norm over training episodes.

    Args:
        records: result of `read_metrics`; charts without data are omitted.
    """
    charts = []
    played = [r for r in records if "rollout/success_at_end" in r]
    evaluated = [r for r in records if "eval/success_at_end" in r]
    if played or evaluated:
        charts.append(_success_chart(played, evaluated))
    if not played:
        return charts
    charts += _task_charts(played)
    series = _reward_series(played)
    for title, unit, wanted in (
        ("reward per episode, by source", "", series),
        ("entropy of the policy", "nats per token", {"entropy": "actor/entropy"}),
        ("size of the updates", "", {"KL to the old policy": "actor/ppo_kl", "clip fraction": "actor/pg_clipfrac"}),
        ("gradient norm", "", {"actor": "actor/grad_norm", "critic": "critic/grad_norm"}),
    ):
        lines = {label: _points(played, name) for label, name in wanted.items()}
        lines = {label: points for label, points in lines.items() if points[0]}
        if wanted is series and len(lines) == 1:  # without a legend
            title = f"reward per episode: {next(iter(lines))}"
        if lines:
            charts.append(_line_chart(title, unit, lines))
    return charts


def _reward_sources(records: Sequence[dict[str, float]]) -> list[str]:
    """Names of reward components below `reward/`, the total first; metrics of sources are excluded."""
    names = {name.removeprefix("reward/") for r in records for name in r if name.startswith("reward/")}
    sources = {*reward_names(), _LATE_SOURCE}
    counts = {name for name in names for source in names | sources if name.startswith(f"{source}_")}
    kinds = {name for name in counts if source_of(name)[1] and source_of(name)[0] not in names}  # --reward NAME:KIND
    return sorted(names - (counts - sources - kinds), key=lambda name: (name != "total", name))


def _reward_series(records: Sequence[dict[str, float]]) -> dict[str, str]:
    """Label -> scalar of each source; a source equal to the total shares its curve."""
    names = _reward_sources(records)
    total = _points(records, "reward/total")
    same = [name for name in names if name != "total" and _points(records, f"reward/{name}") == total]
    label = " = ".join(["total", *same])
    return {label if name == "total" else name: f"reward/{name}" for name in names if name not in same}


def _points(records: Sequence[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    present = [r for r in records if name in r]
    return [r["total/episodes"] for r in present], [r[name] for r in present]


def _success_chart(played: Sequence[dict[str, float]], evaluated: Sequence[dict[str, float]]) -> Chart:
    figure, axes = new_figure("training episodes")
    if played:
        axes.plot(*_points(played, "rollout/success_at_end"), color=COLORS[0], linewidth=1.4, label="rollout, sampled")
    if evaluated:
        x, y = _points(evaluated, "eval/success_at_end")
        bounds = [interval_of_metrics(record) for record in evaluated]
        errors = [[v - low for v, (low, _) in zip(y, bounds)], [high - v for v, (_, high) in zip(y, bounds)]]
        axes.errorbar(
            x, y, yerr=errors, fmt="o-", markersize=3.5, capsize=2.5, color=COLORS[1], label="evaluation, 95 %"
        )
    axes.set_ylim(0, 1.03)
    return Chart("success at end", svg(figure, axes))


def _task_charts(played: Sequence[dict[str, float]]) -> list[Chart]:
    """A matrix of tasks by training episodes, coloured by the success of the rollouts; none with a single task."""
    names = list(dict.fromkeys(name for record in played for name in record if name.startswith(OF_TASKS)))
    if not names:
        return []
    episodes = np.array([record["total/episodes"] for record in played])
    columns = min(_COLUMNS, len(played))
    column = np.ceil(columns * episodes / episodes[-1] - 1e-9).astype(int) - 1
    matrix = np.full((len(names), columns), np.nan)
    for row, name in enumerate(names):
        for at in range(columns):
            found = [record[name] for record, where in zip(played, column) if where == at and name in record]
            matrix[row, at] = np.mean(found) if found else np.nan
    figure, axes = new_figure("training episodes")
    figure.set_figheight(1.0 + 0.17 * len(names))
    axes.grid(visible=False)
    shape = (0.0, episodes[-1], len(names) - 0.5, -0.5)
    image = axes.imshow(matrix, aspect="auto", interpolation="nearest", vmin=0, vmax=1, cmap="viridis", extent=shape)
    axes.set_yticks(range(len(names)), _short_names([name.removeprefix(OF_TASKS) for name in names]), fontsize=6.5)
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05)
    bar.ax.tick_params(colors=INK, labelsize=6.5)
    return [Chart("success at end of each task (rollout, sampled)", svg(figure, axes, legend=False))]


def _short_names(names: Sequence[str]) -> list[str]:
    """Names of tasks that fit beside a chart: those of LIBERO are sentences that differ in their middle."""
    if max(map(len, names)) <= _LABEL:
        return list(names)
    start, end = len(commonprefix(names)), len(commonprefix([name[::-1] for name in names]))
    middles = [name[start : max(start, len(name) - end)] or name for name in names]
    return [m if len(m) <= _LABEL else f"{m[: _LABEL // 2]}…{m[-(_LABEL // 2 - 1) :]}" for m in middles]


def _line_chart(title: str, unit: str, lines: dict[str, tuple[list[float], list[float]]]) -> Chart:
    figure, axes = new_figure("training episodes")
    for color, (label, points) in zip(COLORS * len(lines), lines.items()):
        axes.plot(*points, color=color, linewidth=1.4, label=label.replace("$", r"\$"))  # no formula
    axes.set_ylabel(unit, color=INK, fontsize=8)
    return Chart(title, svg(figure, axes, legend=len(lines) > 1))

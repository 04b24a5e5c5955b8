"""One HTML file that shows an evaluation: it opens from a disk, without a network, on any width of screen."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvla.trainer.eval_comparison import MEAN_OF_SUITES
from rlvla.trainer.eval_record import PolicyEvaluation
from rlvla.trainer.eval_suites import Findings, SuiteEvaluation, SuitesResult
from rlvla.trainer.report_charts import learning_charts
from rlvla.utils.config_file import command_line
from rlvla.utils.logging import read_metrics
from rlvla.utils.run_folder import RUN_FILE
from rlvla.utils.runs import write_atomic
from rlvla.utils.video import video_size

REPORT_FILE = "report.html"
_RUN_FILES = (RUN_FILE, "totals.json")  # of the training run that a policy came from


def write_report(folder: Path, findings: Findings) -> Path:
    """Write `report.html` into `folder` and return its path.

    Learning curves and configuration come from the run folder around the policy, where there is one; videos are
    embedded.

    Args:
        folder: is made where it does not exist.
        findings: of the evaluation.
    """
    path = folder / REPORT_FILE
    write_atomic(path, render_report(findings).encode())
    return path


def render_report(findings: Findings) -> str:
    """The page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rlvla.trainer", "templates"), autoescape=True, undefined=StrictUndefined
    )
    suites, own = findings.suites, findings.first.own
    run_folder = Path(own.policy).parent
    heads: Sequence[Any] = [result for result in findings.results if result.position == 0] or own.results
    return environment.get_template("report.html.jinja").render(
        title=f"{own.policy}: {heads[0].success_at_end}",
        own=own,
        names=", ".join(suites),
        seed=next(iter(own.protocols.values()))["seed"],
        heads=heads,
        head_comparisons=findings.comparisons or findings.first.comparisons,
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
        table=_table,
        percent=lambda rate: f"{100 * rate:.1f} %",
        points=lambda difference: f"{100 * difference:+.1f}",
        counted=lambda number, what: f"{number} {what}" + "s" * (number != 1),
    )


def _bars(own: PolicyEvaluation, baselines: Sequence[PolicyEvaluation]) -> list[dict[str, Any]]:
    """For each mode and task, the success of every policy; a baseline without the mode or the task has no bar."""
    groups = []
    for result in own.results:
        tasks = []
        for task in [*result.tasks, *([None] if len(result.tasks) > 1 else [])]:
            bars = []
            for evaluation in [own, *baselines]:
                other = evaluation.result(result.mode)
                entries: list[Any] = [] if other is None else [other] if task is None else list(other.tasks)
                entries = [e for e in entries if task is None or e.task_id == task.task_id]
                bars += [
                    {"policy": evaluation.policy, "own": evaluation is own, "rate": e.success_at_end} for e in entries
                ]
            tasks.append({"name": "all tasks" if task is None else task.name, "bars": bars})
        groups.append({"mode": result.mode, "tasks": tasks})
    return groups


def _bars_of_suites(over_all: Sequence[SuitesResult]) -> list[dict[str, Any]]:
    """For each mode and suite the success of every policy, and the mean of the suites."""
    groups = []
    for mode in dict.fromkeys(result.mode for result in over_all):
        results = [result for result in over_all if result.mode == mode]
        rows: list[tuple[str, list[Any]]] = [(name, [r.results[name] for r in results]) for name in results[0].results]
        groups.append(
            {
                "mode": mode,
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


def _videos(evaluations: Sequence[PolicyEvaluation]) -> dict[str, list[dict[str, Any]]]:
    """By policy and mode; those of an earlier result may have been removed since."""
    found = {
        f"{evaluation.policy}, {mode}": [_video(path) for path in paths if path.is_file()]
        for evaluation in evaluations
        for mode, paths in evaluation.videos.items()
    }
    return {heading: videos for heading, videos in found.items() if videos}


def _video(path: Path) -> dict[str, Any]:
    """What the page needs of a file that `record_videos` has named."""
    task, _, state = path.stem.rpartition("_")[0].rpartition("_state")
    size = video_size(path)
    return {
        "name": f"{task.replace('_', ' ')}, initial state {state}",
        "success": path.stem.endswith("_success"),
        "tall": None if size is None else f"{size[1] / size[0]:.4f}",
        "data": base64.b64encode(path.read_bytes()).decode(),
    }


def _configurations(suites: Mapping[str, SuiteEvaluation], run_folder: Path) -> list[tuple[str, str]]:
    found = [("command", command_line())]
    for name, suite in suites.items():
        label = f"{name}: " if len(suites) > 1 else ""
        protocols = {mode: _shortened(protocol) for mode, protocol in suite.own.protocols.items()}
        found += [
            (f"{label}protocol", json.dumps(protocols, indent=2)),
            (f"{label}environment", json.dumps(suite.own.environment, indent=2)),
        ]
    for name in _RUN_FILES:
        if (run_folder / name).is_file():
            found.append((f"training: {name}", (run_folder / name).read_text(encoding="utf-8")))
    return found


def _shortened(protocol: dict[str, Any]) -> dict[str, Any]:
    """With initial states as one line per task."""
    tasks = [{**task, "init_states": _span(task["init_states"])} for task in protocol["tasks"]]
    return {**protocol, "tasks": tasks}


def _span(states: Sequence[int]) -> str:
    first, last = states[0], states[-1]
    if list(states) == list(range(first, last + 1)):
        return f"{first}..{last}"
    return " ".join(map(str, states))


def _table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    from markupsafe import Markup, escape

    words = [not any(char.isdigit() for row in rows for char in str(row[i])) for i in range(len(headers))]
    words[0] = True  # names of tasks

    def line(tag: str, cells: Sequence[Any]) -> str:
        kinds = [' class="words"' if kind else "" for kind in words]
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(str(c))}</{tag}>" for c, kind in zip(cells, kinds)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return Markup(f"<table><thead>{line('th', headers)}</thead><tbody>{body}</tbody></table>")

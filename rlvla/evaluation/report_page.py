"""HTML report of an evaluation, with charts and videos."""

from __future__ import annotations

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvla.checkpoints.run_folder import RUN_FILE, TOTALS_FILE
from rlvla.evaluation.comparison import MEAN_OF_SUITES
from rlvla.evaluation.learning_charts import learning_charts
from rlvla.evaluation.pages import labels, render
from rlvla.evaluation.report import EvaluationReport, PolicyEvaluation, SuiteEvaluation, SuitesResult
from rlvla.evaluation.results import EvalResult
from rlvla.evaluation.videos import recorded_state
from rlvla.utils.cli.programs import command_line
from rlvla.utils.files import read_metrics, write_atomic
from rlvla.utils.video import video_poster, video_size

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


_MOST_CELLS = 5000  # of a grid; beyond that nobody looks at single states
# Kind -> (sign in the cell, words of the legend).
WON_AND_LOST = {
    "won": ("+", "only the policy"),
    "lost": ("−", "only the baseline"),
    "both": ("", "both"),
    "neither": ("", "neither"),
}
SOLVED = {"both": ("", "solved"), "partly": ("", "in some of the samples"), "neither": ("", "not solved")}


@dataclass(frozen=True)
class StateGrid:
    """A cell for each initial state.

    Attributes:
        kinds: kind -> (sign, words), as in `WON_AND_LOST`.
        rows: task name -> (initial state, kind) of each of its states.
    """

    kinds: Mapping[str, tuple[str, str]]
    rows: Mapping[str, Sequence[tuple[int, str]]]

    @property
    def legend(self) -> list[tuple[str, str, str, int]]:
        """(kind, sign, words, number of states) of the kinds that occur."""
        counts = Counter(kind for cells in self.rows.values() for _, kind in cells)
        return [(kind, *words, counts[kind]) for kind, words in self.kinds.items() if counts[kind]]


def won_and_lost(own: EvalResult, base: EvalResult) -> StateGrid | None:
    """The states that both have played; None if there are none, or too many to look at."""
    mine, theirs = _successes(own), _successes(base)
    kinds = {(True, True): "both", (True, False): "won", (False, True): "lost", (False, False): "neither"}
    cells = {key: kinds[all(mine[key]), all(theirs[key])] for key in mine if key in theirs}
    return _grid(own, cells, WON_AND_LOST)


def solved(result: EvalResult) -> StateGrid | None:
    """The states of one policy; None if they are too many to look at."""
    cells = {
        key: "both" if all(outcomes) else "partly" if any(outcomes) else "neither"
        for key, outcomes in _successes(result).items()
    }
    return _grid(result, cells, SOLVED)


def _successes(result: EvalResult) -> dict[tuple[int, int], list[bool]]:
    """(Task id, initial state) -> success at end of its episodes."""
    found: defaultdict[tuple[int, int], list[bool]] = defaultdict(list)
    for episode in result.episodes:
        found[episode.task_id, episode.init_state_id].append(episode.success_at_end)
    return found


def _grid(
    result: EvalResult, cells: Mapping[tuple[int, int], str], kinds: Mapping[str, tuple[str, str]]
) -> StateGrid | None:
    if not 0 < len(cells) <= _MOST_CELLS:
        return None
    rows: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    names = {task.task_id: task.name for task in result.tasks}
    for (task_id, state), kind in sorted(cells.items()):
        rows[names[task_id]].append((state, kind))
    return StateGrid(kinds, dict(rows))


@dataclass(frozen=True)
class ShownVideo:
    """An embedded video.

    Attributes:
        name: the episode.
        success: success at its end.
        policy: label of the policy.
        tall: height divided by width, as text; None if unknown.
        data, poster: base64; the poster is the last frame as JPEG, "" if unknown.
    """

    name: str
    success: bool
    policy: str
    tall: str | None
    data: str
    poster: str


@dataclass(frozen=True)
class ShownVideos:
    """The videos of a suite.

    Attributes:
        beside: episode and mode -> its videos of several policies, baselines first.
        others: policy and mode -> videos of episodes that no other policy was filmed in.
    """

    beside: Mapping[str, Sequence[ShownVideo]]
    others: Mapping[str, Sequence[ShownVideo]]

    def __bool__(self) -> bool:
        return bool(self.beside or self.others)


def shown_videos(everyone: Sequence[PolicyEvaluation], labels: Mapping[str, str]) -> ShownVideos:
    """The recorded episodes of a policy and its baselines; files that no longer exist are skipped."""
    filmed: defaultdict[tuple[str, str, int], list[tuple[PolicyEvaluation, Path]]] = defaultdict(list)
    for evaluation in [*everyone[1:], *everyone[:1]]:  # before, then after
        for mode, paths in evaluation.videos.items():
            for path in paths:
                if path.is_file():
                    filmed[(mode, *recorded_state(path))].append((evaluation, path))
    beside: dict[str, list[ShownVideo]] = {}
    others: dict[tuple[int, str], list[ShownVideo]] = {}
    for (mode, task, state), entries in filmed.items():
        videos = [_video(path, f"{task}, initial state {state}", labels[e.policy]) for e, path in entries]
        if len(videos) > 1:
            beside[f"{task}, initial state {state}, {mode}"] = videos
            continue
        (evaluation, _) = entries[0]
        others.setdefault((everyone.index(evaluation), f"{labels[evaluation.policy]}, {mode}"), []).extend(videos)
    return ShownVideos(beside, {heading: others[position, heading] for position, heading in sorted(others)})


def _video(path: Path, name: str, policy: str) -> ShownVideo:
    size, poster = video_size(path), video_poster(path)
    return ShownVideo(
        name=name,
        success=path.stem.endswith("_success"),
        policy=policy,
        tall=None if size is None else f"{size[1] / size[0]:.4f}",
        data=base64.b64encode(path.read_bytes()).decode(),
        poster="" if poster is None else base64.b64encode(poster).decode(),
    )

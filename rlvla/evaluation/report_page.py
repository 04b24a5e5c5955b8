"""HTML report of an evaluation: charts, grids of initial states, videos."""

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
from rlvla.evaluation.pages import Chart, labels, render
from rlvla.evaluation.report import EvaluationReport, PolicyEvaluation, SuiteEvaluation, SuitesResult
from rlvla.evaluation.results import EvalResult
from rlvla.evaluation.videos import recorded_state
from rlvla.utils.cli.programs import command_line
from rlvla.utils.files import read_metrics, write_atomic
from rlvla.utils.video import video_poster, video_size

REPORT_FILE = "report.html"
# Name of a task or suite -> (policy, whether it is the evaluated one, result or None) of each policy.
_BarRow = tuple[str, Sequence[tuple[str, bool, Any]]]


def write_report(
    folder: Path, report: EvaluationReport, stages: Sequence[Sequence[str]] = (), progress: Chart | None = None
) -> Path:
    """Write `report.html` into `folder` and return its path.

    Learning curves and configuration are read from the run folder of the policy, if any; videos are embedded.

    `stages` are (name, duration, choice, flags) of the stages of the recipe that trained the policy, and `progress`
    shows their success.
    """
    path = folder / REPORT_FILE
    write_atomic(path, render_report(report, stages, progress).encode(errors="replace"))
    return path


def render_report(report: EvaluationReport, stages: Sequence[Sequence[str]] = (), progress: Chart | None = None) -> str:
    """The report as HTML; arguments as in `write_report`."""
    suites, own = report.suites, report.first.own
    run_folder = Path(own.policy).parent
    heads: Sequence[Any] = [result for result in report.results if result.position == 0] or own.results
    names = labels(evaluation.policy for evaluation in report.first.everyone)
    return render(
        "report.html.jinja",
        title=f"{names[own.policy]}: {heads[0].success_at_end}",
        label=lambda policy: names.get(policy, policy),
        own=own,
        names=", ".join(suites),
        seed=next(iter(own.protocols.values()))["seed"],
        heads=heads,
        head_comparisons=report.comparisons or report.first.comparisons,
        conditions=report.conditions,
        categories=report.categories,
        over_all={
            "results": report.results,
            "bars": _bars_of_suites(report.results),
            "comparisons": report.comparisons,
        },
        suites=[
            {
                "of": f"{name}: " if len(suites) > 1 else "",
                "bars": _bars(suite),
                "comparisons": suite.comparisons,
                "everyone": suite.everyone,
                "grids": _grids(suite, names),
                "videos": shown_videos(suite.everyone, names),
            }
            for name, suite in suites.items()
        ],
        charts=learning_charts(read_metrics(run_folder)),
        configurations=_configurations(suites, run_folder),
        versions=report.versions,
        stages=stages,
        progress=progress,
        percent=lambda rate: f"{100 * rate:.1f} %",
        points=lambda difference: f"{100 * difference:+.1f}",
    )


def _grids(suite: SuiteEvaluation, names: Mapping[str, str]) -> list[tuple[str, StateGrid]]:
    """(heading, grid) against each paired baseline, or of the policy alone if there is no baseline."""
    grids = [] if suite.baselines else [(f"States solved, {r.mode}", solved(r)) for r in suite.own.results]
    for (position, mode), comparison in suite.compared.items():
        if comparison.paired:
            grid = won_and_lost(*suite.results_of(position, mode))
            grids.append((f"States won and lost against {names[comparison.baseline]}, {mode}", grid))
    return [(heading, grid) for heading, grid in grids if grid is not None]


def _bars(suite: SuiteEvaluation) -> list[dict[str, Any]]:
    """Success rates of all policies for each mode and task; missing results have no bar."""
    groups = []
    for result in suite.own.results:
        everyone = [(e.policy, e is suite.own, e.result(result.mode)) for e in suite.everyone]
        rows: list[_BarRow] = [
            (name, [(policy, own, r and r.of_listed(name, ids)) for policy, own, r in everyone])
            for name, ids in result.listed
        ]
        if len(result.tasks) > 1:
            rows.append(("all tasks", everyone))
        groups.append(_bar_group(result.mode, rows, [r for *_, r in everyone if r is not None]))
    return groups


def _bars_of_suites(results: Sequence[SuitesResult]) -> list[dict[str, Any]]:
    """Success rates of all policies for each mode and suite, and the mean over suites."""
    groups = []
    for mode in dict.fromkeys(result.mode for result in results):
        of_mode = [result for result in results if result.mode == mode]
        rows: list[_BarRow] = [
            (name, [(r.policy, r.position == 0, r.results[name]) for r in of_mode]) for name in of_mode[0].results
        ]
        rows.append((MEAN_OF_SUITES, [(r.policy, r.position == 0, r) for r in of_mode]))
        groups.append(_bar_group(mode, rows, [single for r in of_mode for single in r.results.values()]))
    return groups


def _bar_group(mode: str, rows: Sequence[_BarRow], results: Sequence[EvalResult]) -> dict[str, Any]:
    tasks = [
        {
            "name": name,
            "bars": [{"policy": p, "own": own, "rate": r.success_at_end} for p, own, r in bars if r is not None],
        }
        for name, bars in rows
    ]
    kinds = dict.fromkeys(result.kind_of_intervals for result in results)
    return {"mode": mode, "tasks": tasks, "intervals": " and ".join(kinds)}


def _configurations(suites: Mapping[str, SuiteEvaluation], run_folder: Path) -> list[tuple[str, str]]:
    settings = [("command", command_line())]
    for name, suite in suites.items():
        label = f"{name}: " if len(suites) > 1 else ""
        protocols = {
            mode: protocol
            | {"tasks": [task | {"init_states": _span(task["init_states"])} for task in protocol["tasks"]]}
            for mode, protocol in suite.own.protocols.items()
        }
        settings += [
            (f"{label}protocol", json.dumps(protocols, indent=2)),
            (f"{label}environment", json.dumps(suite.own.environment, indent=2)),
        ]
    for name in (RUN_FILE, TOTALS_FILE):
        if (run_folder / name).is_file():
            settings.append((f"training: {name}", (run_folder / name).read_text(encoding="utf-8")))
    return settings


def _span(states: Sequence[int]) -> str:
    """Compact list of initial states."""
    first, last = states[0], states[-1]
    if list(states) == list(range(first, last + 1)):
        return f"{first}..{last}"
    return " ".join(map(str, states))


_MOST_CELLS = 5000  # of a readable grid
# Kind -> (sign in the cell, label of the legend).
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
        kinds: kind -> (sign, label), as in `WON_AND_LOST`.
        rows: task name -> (initial state, kind) of each of its states.
    """

    kinds: Mapping[str, tuple[str, str]]
    rows: Mapping[str, Sequence[tuple[int, str]]]

    @property
    def legend(self) -> list[tuple[str, str, str, int]]:
        """(kind, sign, label, number of states) of the kinds that occur."""
        counts = Counter(kind for cells in self.rows.values() for _, kind in cells)
        return [(kind, sign, label, counts[kind]) for kind, (sign, label) in self.kinds.items() if counts[kind]]


def won_and_lost(own: EvalResult, base: EvalResult) -> StateGrid | None:
    """Grid of the states that both have played; None without common states, or with too many."""
    mine, theirs = _successes(own), _successes(base)
    kinds = {(True, True): "both", (True, False): "won", (False, True): "lost", (False, False): "neither"}
    cells = {key: kinds[all(mine[key]), all(theirs[key])] for key in mine if key in theirs}
    return _grid(own, cells, WON_AND_LOST)


def solved(result: EvalResult) -> StateGrid | None:
    """Grid of the states of one policy; None if there are too many."""
    cells = {
        key: "both" if all(outcomes) else "partly" if any(outcomes) else "neither"
        for key, outcomes in _successes(result).items()
    }
    return _grid(result, cells, SOLVED)


def _successes(result: EvalResult) -> dict[tuple[int, int], list[bool]]:
    """(Task id, initial state) -> success at end of its episodes."""
    successes: defaultdict[tuple[int, int], list[bool]] = defaultdict(list)
    for episode in result.episodes:
        successes[episode.task_id, episode.init_state_id].append(episode.success_at_end)
    return successes


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
        others: policy and mode -> videos of episodes recorded for one policy only.
    """

    beside: Mapping[str, Sequence[ShownVideo]]
    others: Mapping[str, Sequence[ShownVideo]]

    def __bool__(self) -> bool:
        return bool(self.beside or self.others)


_CHANGES = (": lost", ": gained", "")


def shown_videos(everyone: Sequence[PolicyEvaluation], labels: Mapping[str, str]) -> ShownVideos:
    """Videos of a policy and its baselines, states that were lost and gained first; missing files are skipped."""
    recorded: defaultdict[tuple[str, str, int], list[tuple[PolicyEvaluation, Path]]] = defaultdict(list)
    for evaluation in [*everyone[1:], *everyone[:1]]:  # before, then after
        for mode, paths in evaluation.videos.items():
            for path in paths:
                if path.is_file():
                    recorded[(mode, *recorded_state(path))].append((evaluation, path))
    beside: dict[tuple[int, str], list[ShownVideo]] = {}
    others: dict[tuple[int, str], list[ShownVideo]] = {}
    for (mode, task, state), entries in recorded.items():
        videos = [_video(path, f"{task}, initial state {state}", labels[e.policy]) for e, path in entries]
        if len(videos) > 1:
            changes = {video.success for video in videos[:-1]} - {videos[-1].success}  # the policy is the last
            compared = bool(changes) and entries[-1][0] is everyone[0]
            kind = int(videos[-1].success) if compared else 2
            beside[kind, f"{task}, initial state {state}, {mode}{_CHANGES[kind]}"] = videos
            continue
        (evaluation, _) = entries[0]
        others.setdefault((everyone.index(evaluation), f"{labels[evaluation.policy]}, {mode}"), []).extend(videos)
    in_order = {heading: beside[kind, heading] for kind, heading in sorted(beside, key=lambda key: key[0])}
    return ShownVideos(in_order, {heading: others[position, heading] for position, heading in sorted(others)})


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

"""Learning curves of a run: success, rewards, entropy, updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonprefix

import numpy as np

from rlvla.evaluation.pages import COLORS, INK, LABEL_SIZE, Chart, new_figure, svg, widen
from rlvla.evaluation.statistics import interval_of_metrics
from rlvla.rewards.base import reward_names, source_of
from rlvla.rollout.stats import OF_TASKS

_MODEL_SOURCE = "rm_model"  # registered only when a model is loaded
_COLUMNS = 40  # maximum of the matrix of tasks by training episodes
_SMALL = 8.5  # points: task names
_LABEL = 34  # characters of a task name
# Scalar -> smallest range of its axis: changes that are small beside it mean nothing.
SMALLEST_SPAN = {"actor/entropy": 0.5, "actor/ppo_kl": 0.01, "actor/pg_clipfrac": 0.05, "reward/total": 0.1}


def learning_charts(records: Sequence[dict[str, float]]) -> list[Chart]:
    """Success (also by task), reward components, entropy, size of updates and gradient norm over training episodes.

    `records` are from `read_metrics`; charts without data are left out.
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
    for title, unit, scalars in (
        ("reward per episode, by source", "", series),
        ("entropy of the policy", "nats per action dimension", {"entropy": "actor/entropy"}),
        ("size of the updates", "", {"KL to the old policy": "actor/ppo_kl", "clip fraction": "actor/pg_clipfrac"}),
        ("gradient norm", "", {"actor": "actor/grad_norm", "critic": "critic/grad_norm"}),
    ):
        lines = {label: metric_curve(played, name) for label, name in scalars.items()}
        lines = {label: points for label, points in lines.items() if points[0]}
        if scalars is series and len(lines) == 1:  # without a legend
            title = f"reward per episode: {next(iter(lines))}"
        if lines:
            span = max((SMALLEST_SPAN.get(name, 0.0) for name in scalars.values()), default=0.0)
            charts.append(_line_chart(title, unit, lines, span))
    return charts


def _reward_sources(records: Sequence[dict[str, float]]) -> list[str]:
    """Names of reward components below `reward/`, the total first; metrics of sources are excluded."""
    names = {name.removeprefix("reward/") for r in records for name in r if name.startswith("reward/")}
    sources = {*reward_names(), _MODEL_SOURCE}
    counts = {name for name in names for source in names | sources if name.startswith(f"{source}_")}
    kinds = {name for name in counts if source_of(name)[1] and source_of(name)[0] not in names}  # --reward NAME:KIND
    return sorted(names - (counts - sources - kinds), key=lambda name: (name != "total", name))


def _reward_series(records: Sequence[dict[str, float]]) -> dict[str, str]:
    """Label -> scalar of each source; a source equal to the total shares its curve."""
    names = _reward_sources(records)
    total = metric_curve(records, "reward/total")
    same = [name for name in names if name != "total" and metric_curve(records, f"reward/{name}") == total]
    label = " = ".join(["total", *same])
    return {label if name == "total" else name: f"reward/{name}" for name in names if name not in same}


def metric_curve(records: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    """(training episodes, values) of a scalar."""
    present = [r for r in records if name in r and "total/episodes" in r]
    return [r["total/episodes"] for r in present], [r[name] for r in present]


def _success_chart(played: Sequence[dict[str, float]], evaluated: Sequence[dict[str, float]]) -> Chart:
    figure, axes = new_figure("training episodes")
    if played:
        axes.plot(
            *metric_curve(played, "rollout/success_at_end"), color=COLORS[0], linewidth=1.8, label="rollout, sampled"
        )
    if evaluated:
        x, y = metric_curve(evaluated, "eval/success_at_end")
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
            rates = [record[name] for record, where in zip(played, column) if where == at and name in record]
            matrix[row, at] = np.mean(rates) if rates else np.nan
    figure, axes = new_figure("training episodes")
    figure.set_figheight(1.0 + 0.2 * len(names))
    axes.grid(visible=False)
    shape = (0.0, episodes[-1], len(names) - 0.5, -0.5)
    image = axes.imshow(matrix, aspect="auto", interpolation="nearest", vmin=0, vmax=1, cmap="viridis", extent=shape)
    labels = _short_names([name.removeprefix(OF_TASKS) for name in names])
    axes.set_yticks(range(len(names)), labels, fontsize=_SMALL, parse_math=False)
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05)
    bar.ax.tick_params(colors=INK, labelsize=_SMALL)
    return [Chart("success at end of each task (rollout, sampled)", svg(figure, axes, legend=False))]


def _short_names(names: Sequence[str]) -> list[str]:
    """Task names cut to fit beside a chart; LIBERO's are sentences that differ in their middle."""
    if max(map(len, names)) <= _LABEL:
        return list(names)
    start, end = len(commonprefix(names)), len(commonprefix([name[::-1] for name in names]))
    middles = [name[start : max(start, len(name) - end)] or name for name in names]
    return [m if len(m) <= _LABEL else f"{m[: _LABEL // 2]}…{m[-(_LABEL // 2 - 1) :]}" for m in middles]


def _line_chart(title: str, unit: str, lines: dict[str, tuple[list[float], list[float]]], span: float) -> Chart:
    figure, axes = new_figure("training episodes")
    for color, (label, points) in zip(COLORS * len(lines), lines.items()):
        axes.plot(*points, color=color, linewidth=1.8, label=label.replace("$", r"\$"))  # no formula
    widen(axes, span)
    axes.set_ylabel(unit, color=INK, fontsize=LABEL_SIZE)
    return Chart(title, svg(figure, axes, legend=len(lines) > 1))

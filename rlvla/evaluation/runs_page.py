"""A page that compares runs: success of groups with intervals, and their curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlvla.evaluation.pages import COLORS, INK, LABEL_SIZE, Chart, new_figure, render, svg
from rlvla.evaluation.runs import (
    DIFFERENCE_HEADERS,
    GROUP_HEADERS,
    RUN_HEADERS,
    Group,
    Run,
    difference_rows,
    differences,
    group_rows,
    letter_of,
    run_rows,
)

_POINTS = 100  # of a mean curve
# Scalar -> title and unit; those that no run has are left out.
_CURVES = {
    "eval/success_at_end": ("success at end, evaluated", ""),
    "rollout/success_at_end": ("success at end, training episodes", ""),
    "reward/total": ("reward per episode", ""),
    "actor/entropy": ("entropy of the policy", "nats per action dimension"),
    "actor/ppo_kl": ("KL to the old policy", ""),
    "rollout/episode_length": ("episode length", "environment steps"),
}


def render_runs_page(groups: Sequence[Group]) -> str:
    """The page as HTML."""
    return render(
        "compare_runs.html.jinja",
        groups=groups,
        letters=[letter_of(number) for number in range(len(groups))],
        colors=[COLORS[number % len(COLORS)] for number in range(len(groups))],
        group_table=(GROUP_HEADERS, group_rows(groups)),
        run_table=(RUN_HEADERS, run_rows(groups)),
        difference_table=(DIFFERENCE_HEADERS, difference_rows(differences(groups))),
        charts=[chart for name, words in _CURVES.items() if (chart := _chart(name, *words, groups)) is not None],
        percent=lambda rate: f"{100 * rate:.1f} %",
    )


def _chart(name: str, title: str, unit: str, groups: Sequence[Group]) -> Chart | None:
    """A scalar over training episodes: a thin line for each run, a thick one for the mean of each group."""
    figure, axes = new_figure("training episodes")
    drawn = False
    for number, group in enumerate(groups):
        color = COLORS[number % len(COLORS)]
        curves = [curve for run in group.runs if len((curve := _curve(run, name))[0])]
        for x, y in curves:
            width, alpha = (0.9, 0.55) if len(curves) > 1 else (1.8, 1)
            axes.plot(x, y, color=color, linewidth=width, alpha=alpha, marker="o" if len(x) == 1 else None)
            drawn = True
        if len(curves) > 1 and len(curves) == len(group.runs) and max(len(x) for x, _ in curves) > 1:
            axes.plot(*_mean(curves), color=color, linewidth=2.2)
    if not drawn:
        return None
    if "success" in name:
        axes.set_ylim(0, 1.03)
    axes.set_ylabel(unit, color=INK, fontsize=LABEL_SIZE)
    return Chart(title, svg(figure, axes, legend=False))


def _curve(run: Run, name: str) -> tuple[list[float], list[float]]:
    records: list[Mapping[str, float]] = [r for r in run.records if name in r and "total/episodes" in r]
    return [r["total/episodes"] for r in records], [r[name] for r in records]


def _mean(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the curves, interpolated, where all of them have values."""
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(start, max(start, end), _POINTS)
    return grid, np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)

"""Learning curves as SVG, drawn so that they can be read on a light and on a dark page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvla.rewards.base import reward_names
from rlvla.utils.statistics import wilson_interval

_COLOURS = ("#2f7df6", "#e0563b", "#2f9e5b", "#b07cf0", "#d29a1f", "#1aa7b5")
# Registered when a model is asked for.
_LATE_SOURCE = "rm_model"
_INK = "#7b8494"  # axes and letters: readable on white and on black


@dataclass(frozen=True)
class Chart:
    """A picture with its title; `svg` is markup to be placed into a page."""

    title: str
    svg: Any


def learning_charts(records: Sequence[dict[str, float]]) -> list[Chart]:
    """Success, reward components, entropy, KL and clip fraction, gradient norm over training episodes.

    Args:
        records: of `read_metrics`. What is not among them is left out; without any there is no chart.
    """
    charts = []
    played = [r for r in records if "rollout/success_at_end" in r]
    evaluated = [r for r in records if "eval/success_at_end" in r]
    if played or evaluated:
        charts.append(_success_chart(played, evaluated))
    if not played:
        return charts
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
    """Names below `reward/` that are paid, the total first; what a source counts (`success_regressions`) is not."""
    names = {name.removeprefix("reward/") for r in records for name in r if name.startswith("reward/")}
    counts = {name for name in names for source in names if name.startswith(f"{source}_")}
    return sorted(names - (counts - {*reward_names(), _LATE_SOURCE}), key=lambda name: (name != "total", name))


def _reward_series(records: Sequence[dict[str, float]]) -> dict[str, str]:
    """Label -> scalar of each source; one that is all of the total has no curve of its own."""
    names = _reward_sources(records)
    total = _points(records, "reward/total")
    same = [name for name in names if name != "total" and _points(records, f"reward/{name}") == total]
    label = " = ".join(["total", *same])
    return {label if name == "total" else name: f"reward/{name}" for name in names if name not in same}


def _points(records: Sequence[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    own = [r for r in records if name in r]
    return [r["total/episodes"] for r in own], [r[name] for r in own]


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.9, 2.5), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.25, color=_INK, linewidth=0.6)
    axes.tick_params(colors=_INK, labelsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
    axes.set_xlabel("training episodes", color=_INK, fontsize=8)
    return figure, axes


def _success_chart(played: Sequence[dict[str, float]], evaluated: Sequence[dict[str, float]]) -> Chart:
    figure, axes = _figure()
    if played:
        axes.plot(
            *_points(played, "rollout/success_at_end"), color=_COLOURS[0], linewidth=1.4, label="rollout, sampled"
        )
    if evaluated:
        x, y = _points(evaluated, "eval/success_at_end")
        counts = [(round(v * r["eval/n"]), round(r["eval/n"])) for v, r in zip(y, evaluated)]
        bounds = [wilson_interval(successes, n) for successes, n in counts]
        errors = [[v - low for v, (low, _) in zip(y, bounds)], [high - v for v, (_, high) in zip(y, bounds)]]
        axes.errorbar(
            x, y, yerr=errors, fmt="o-", markersize=3.5, capsize=2.5, color=_COLOURS[1], label="evaluation, 95 %"
        )
    axes.set_ylim(0, 1.03)
    return Chart("success at end", _svg(figure, axes))


def _line_chart(title: str, unit: str, lines: dict[str, tuple[list[float], list[float]]]) -> Chart:
    figure, axes = _figure()
    for colour, (label, points) in zip(_COLOURS * len(lines), lines.items()):
        axes.plot(*points, color=colour, linewidth=1.4, label=label)
    axes.set_ylabel(unit, color=_INK, fontsize=8)
    return Chart(title, _svg(figure, axes, legend=len(lines) > 1))


def _svg(figure: Any, axes: Any, *, legend: bool = True) -> Any:
    import matplotlib
    from markupsafe import Markup

    if legend:
        axes.legend(fontsize=7.5, frameon=False, labelcolor=_INK)
    buffer = io.StringIO()
    # Letters as text: a tenth of the size. The salt makes element names, and with them the file, reproducible.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": axes.get_xlabel(), "font.family": "sans-serif"}
    ):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    return Markup(re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawing)))

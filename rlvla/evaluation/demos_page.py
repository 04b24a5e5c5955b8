"""HTML page of demonstrations: findings, pictures, actions, lengths, initial states."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.quality import ActionFacts, Finding, action_facts, initial_states
from rlvla.evaluation.pages import COLORS, INK, LABEL_SIZE, NOT_RECORDED, Chart, new_figure, render, svg
from rlvla.utils.video import upright

T = TypeVar("T")
_FRAMES = 8  # pictures of an episode
_SMALLEST, _LARGEST = 96, 160  # pixels: side of a picture on the page
_GAP = 4
_BINS = 40
_MOST_ROWS = 12  # instructions
_STARTS = 400  # episodes in the mean of the first pictures


@dataclass(frozen=True)
class DemosPage:
    """Content of the page.

    Attributes:
        title: heading, for example the paths.
        findings: errors first.
        headers, rows: table of the files.
        replayed: a sentence about the replayed episodes.
        demos: all episodes; None if they could not be read.
        names: name of each episode.
        flipped: whether pictures are stored bottom row first.
        training_states: number of initial states for training, and of all; None if unknown.
    """

    title: str
    findings: Sequence[Finding]
    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    replayed: str
    demos: Demonstrations | None
    names: Sequence[str]
    flipped: bool = False
    training_states: tuple[int, int] | None = None


def render_demos_page(page: DemosPage, episodes: int = 6) -> str:
    """The page as HTML with embedded pictures, of so many `episodes`."""
    demos = page.demos
    if demos is None:
        return render("check_demos.html.jinja", page=page)
    return render(
        "check_demos.html.jinja",
        page=page,
        cameras=demos.env_args["cameras"],
        strips=[_strip(page, demos, index) for index in shown_episodes(demos, episodes)],
        starts=_starts(page, demos),
        actions=_action_charts(demos),
        action_table=_action_table(action_facts(demos.actions)),
        lengths=_length_chart(demos),
        coverage=_coverage_charts(page, demos),
        instructions=_instructions(demos),
    )


def shown_episodes(demos: Demonstrations, count: int) -> list[int]:
    """Episodes spread over the dataset, with failures among them if there are any."""
    failed = [i for i, success in enumerate(demos.success) if not success]
    good = [i for i, success in enumerate(demos.success) if success]
    of_failed = min(len(failed), max(count // 3, count - len(good)))
    return sorted(spread(good, count - of_failed) + spread(failed, of_failed))


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` evenly spaced items."""
    if count <= 0 or not items:
        return []
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(int))]


def _strip(page: DemosPage, demos: Demonstrations, index: int) -> dict[str, Any]:
    """Pictures of an episode at a few steps, those of all cameras below each other."""
    images = upright(demos.images[index], page.flipped)
    rows = np.unique(np.linspace(0, len(images) - 1, min(_FRAMES, len(images))).astype(int))
    steps = np.arange(len(demos.actions[index])) if demos.decision_steps is None else demos.decision_steps[index]
    return {
        "name": page.names[index],
        "instruction": demos.instructions[index],
        "success": demos.outcome(index),
        "length": len(demos.actions[index]),
        "state": demos.init_states[index] if demos.init_states else None,
        "frames": [(int(steps[row]), _png([[picture] for picture in images[row]])) for row in rows],
    }


def _starts(page: DemosPage, demos: Demonstrations) -> list[dict[str, Any]]:
    """For each camera the mean and the standard deviation of the first pictures."""
    chosen = spread(range(len(demos.images)), _STARTS)
    shown = []
    for camera, name in enumerate(demos.env_args["cameras"]):
        first = np.stack([demos.images[i][0, camera] for i in chosen]).astype(np.float32)
        apart = first.std(0).mean(-1, keepdims=True)
        apart = np.repeat(255 * apart / max(float(apart.max()), 1.0), 3, axis=-1)
        pair = [upright(picture.round().astype(np.uint8), page.flipped) for picture in (first.mean(0), apart)]
        shown.append({"camera": name, "data": _png([pair])})
    return shown


def _png(rows: Sequence[Sequence[np.ndarray]]) -> str:
    """Rows of pictures [H, W, 3] as one PNG in base64."""
    from PIL import Image

    height, width = rows[0][0].shape[:2]
    scale = max(1, -(-_SMALLEST // width)) if width < _SMALLEST else min(1.0, _LARGEST / width)
    tile = round(width * scale), round(height * scale)
    columns = max(map(len, rows))
    sheet = Image.new("RGBA", (columns * (tile[0] + _GAP) - _GAP, len(rows) * (tile[1] + _GAP) - _GAP))
    for i, row in enumerate(rows):
        for j, picture in enumerate(row):
            how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
            small = Image.fromarray(np.ascontiguousarray(picture)).resize(tile, how)
            sheet.paste(small, (j * (tile[0] + _GAP), i * (tile[1] + _GAP)))
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _action_charts(demos: Demonstrations) -> list[Chart]:
    actions = np.concatenate(demos.actions)
    charts = []
    for dim in range(actions.shape[1]):
        figure, axes = new_figure("value")
        axes.hist(actions[:, dim], bins=_BINS, color=COLORS[0])
        axes.set_ylabel("steps", color=INK, fontsize=LABEL_SIZE)
        charts.append(Chart(f"action dimension {dim}", svg(figure, axes, legend=False)))
    return charts


def _action_table(dimensions: Sequence[ActionFacts]) -> tuple[Sequence[str], list[tuple[Any, ...]]]:
    headers = ("dimension", "lowest", "highest", "mean", "std", "at lowest", "at highest", "distinct values")
    rows = [
        (
            dim,
            *(f"{value:.4g}" for value in (facts.low, facts.high, facts.mean, facts.std)),
            *(f"{100 * share:.1f} %" for share in (facts.at_low, facts.at_high)),
            facts.distinct,
        )
        for dim, facts in enumerate(dimensions)
    ]
    return headers, rows


def _length_chart(demos: Demonstrations) -> Chart:
    figure, axes = new_figure("environment steps")
    lengths, success = np.array([len(actions) for actions in demos.actions]), np.array(demos.success, bool)
    bins = np.linspace(lengths.min() - 0.5, lengths.max() + 0.5, min(_BINS, int(np.ptp(lengths)) + 1) + 1)
    kinds = [("success" if demos.success_recorded else "episodes", success, COLORS[0])]
    kinds.append(("no success", ~success, COLORS[1]))
    kinds = [kind for kind in kinds if kind[1].any()]
    axes.hist(
        [lengths[which] for _, which, _ in kinds],
        bins=bins.tolist(),
        stacked=True,
        color=[color for _, _, color in kinds],
        label=[name for name, _, _ in kinds],
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    _count_episodes(axes)
    return Chart("length of the episodes", svg(figure, axes))


def _count_episodes(axes: Any) -> None:
    axes.set_ylabel("episodes", color=INK, fontsize=LABEL_SIZE)
    axes.yaxis.get_major_locator().set_params(integer=True)


def _coverage_charts(page: DemosPage, demos: Demonstrations) -> list[Chart]:
    """Episodes by number of the initial state, for each task."""
    charts = []
    for task_id, states in initial_states(demos).items():
        figure, axes = new_figure("number of the initial state")
        last = max(max(states) + 1, page.training_states[1] if page.training_states else 0)
        axes.hist(states, bins=np.linspace(0, last, _BINS + 1).tolist(), color=COLORS[0])
        if page.training_states:
            axes.axvspan(page.training_states[0], last, color=COLORS[1], alpha=0.15, label="held out")
        _count_episodes(axes)
        distinct = f", {len(set(states))} different states" if len(set(states)) < len(states) else ""
        title = f"task {task_id}: {len(states)} episodes{distinct}"
        charts.append(Chart(title, svg(figure, axes, legend=page.training_states is not None)))
    return charts


def _instructions(demos: Demonstrations) -> list[tuple[Any, ...]]:
    counts, good = Counter(demos.instructions), Counter(t for t, s in zip(demos.instructions, demos.success) if s)
    rows = [
        (text, number, f"{100 * good[text] / number:.0f} %" if demos.success_recorded else NOT_RECORDED)
        for text, number in counts.most_common(_MOST_ROWS)
    ]
    rest = len(counts) - len(rows)
    return rows + ([(f"and {rest} more", sum(counts.values()) - sum(row[1] for row in rows), "")] if rest else [])

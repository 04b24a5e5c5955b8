"""Viewers of recorded episodes (frames, actions, rewards, events over time): an HTML page and Rerun recordings."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.evaluation.pages import COLORS, outcome_text, render
from rlvla.utils.errors import require

_SMALLEST, _LARGEST = 160, 240  # pixels: side of a picture on the page
_HEIGHT = 100.0  # of a plot, in SVG units
_MARGIN = 4.0
_WIDEST = 16_384  # pixels of a row of frames: JPEG ends at 65,535, pictures that browsers draw at half of that


@dataclass(frozen=True)
class ViewedEpisode:
    """A recorded episode of S environment steps.

    Attributes:
        name: its name in the file.
        instruction: the language instruction.
        success: whether it ended in success; None if that is not recorded.
        frames: camera -> [F, H, W, 3] uint8, top of the scene first.
        frame_steps: [F] steps before which the frames were observed; S for a frame after the last step.
        actions: [S, D].
        rewards: name -> [S].
        events: name -> [S] bool, whether it held after each step.
        state: (task id, initial state id); None if unknown.
    """

    name: str
    instruction: str
    success: bool | None
    frames: Mapping[str, np.ndarray]
    frame_steps: np.ndarray
    actions: np.ndarray
    rewards: Mapping[str, np.ndarray] = field(default_factory=dict)
    events: Mapping[str, np.ndarray] = field(default_factory=dict)
    state: tuple[int, int] | None = None


def render_data_page(
    title: str, subtitle: str, episodes: Sequence[ViewedEpisode], max_frames: int, control_freq: float | None = None
) -> str:
    """The page as HTML with embedded pictures and JavaScript.

    It shows at most `max_frames` evenly spaced frames of an episode and camera, at `control_freq` steps per second
    (default ten).
    """
    return render(
        "view_data.html.jinja",
        title=title,
        subtitle=subtitle,
        episodes=[_shown(episode, max_frames) for episode in episodes],
        step_ms=round(1000 / (control_freq or 10.0)),
    )


def _shown(episode: ViewedEpisode, max_frames: int) -> dict[str, Any]:
    """Template variables of an episode."""
    steps = len(episode.actions)
    count = len(episode.frame_steps)
    rows = np.unique(np.linspace(0, count - 1, min(max_frames, count)).round().astype(int))
    plots = [_plot("actions", {str(dim): column for dim, column in enumerate(episode.actions.T)}, steps)]
    if episode.rewards:
        plots.append(_plot("reward of each step", episode.rewards, steps))
        sums = {name: values.cumsum() for name, values in episode.rewards.items()}
        plots.append(_plot("reward so far", sums, steps))
    return {
        "episode": episode,
        "steps": steps,
        "frame_steps": [int(step) for step in episode.frame_steps[rows]],
        "sprites": {camera: _sprite(frames[rows]) for camera, frames in episode.frames.items()},
        "plots": plots,
        "events": {name: _runs(held, steps) for name, held in episode.events.items()},
    }


def _sprite(frames: np.ndarray) -> dict[str, Any]:
    """Frames [F, H, W, 3] in rows of one picture, and the size of one on the page."""
    from PIL import Image

    height, width = frames.shape[1:3]
    side = max(height, width)
    scale = -(-_SMALLEST // side) if side < _SMALLEST else min(1.0, _LARGEST / side)
    shown = round(width * scale), round(height * scale)
    if scale < 1:  # larger frames are reduced; smaller ones are enlarged by the browser
        frames = np.stack([np.asarray(Image.fromarray(frame).resize(shown)) for frame in frames])
    columns = min(len(frames), _WIDEST // shown[0])
    sheet = Image.fromarray(_in_rows(frames, columns))
    buffer = io.BytesIO()
    kind = "png" if scale > 1 else "jpeg"  # enlarged frames show single pixels
    sheet.save(buffer, kind, quality=88)
    data = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    size = {"width": shown[0], "height": shown[1], "columns": columns, "rows": -(-len(frames) // columns)}
    return {"data": data, "small": scale > 1, **size}


def _in_rows(frames: np.ndarray, columns: int) -> np.ndarray:
    """Arrange frames [F, H, W, 3] in R rows of C columns, padded with black: [R * H, C * W, 3]."""
    count, height, width, channels = frames.shape
    rows = -(-count // columns)
    sheet = np.zeros((rows * columns, height, width, channels), frames.dtype)
    sheet[:count] = frames
    sheet = sheet.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return sheet.reshape(rows * height, columns * width, channels)


def _plot(title: str, lines: Mapping[str, np.ndarray], steps: int) -> dict[str, Any]:
    """A plot over the steps: value of step i from i to i + 1."""
    values = np.stack([np.asarray(line, dtype=np.float64) for line in lines.values()])
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    low, high = min(low, 0.0), max(high, 0.0)  # zero is always visible
    high = high if high > low else low + 1.0

    def y(value: float) -> float:
        return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * (value - low) / (high - low)

    def path(line: np.ndarray) -> str:
        points = [(i + end, y(v)) for i, v in enumerate(line) if np.isfinite(v) for end in (0, 1)]
        return "M" + "L".join(f"{a:g} {b:.1f}" for a, b in points) if points else ""

    return {
        "title": title,
        "low": f"{low:.3g}",
        "high": f"{high:.3g}",
        "zero": f"{y(0.0):.1f}",
        "height": _HEIGHT,
        "lines": [(name, COLORS[i % len(COLORS)], path(line)) for i, (name, line) in enumerate(zip(lines, values))],
    }


def _runs(held: np.ndarray, steps: int) -> list[tuple[str, str]]:
    """(left, width) of each interval in which an event holds, in percent of the time line."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(held, dtype=np.int8), [0]])))
    return [(f"{100 * a / steps:.3f}", f"{100 * (b - a) / steps:.3f}") for a, b in zip(edges[::2], edges[1::2])]


_STEP, _TIME = "step", "episode_time"


def write_recording(path: Path, episodes: Sequence[ViewedEpisode], control_freq: float | None = None) -> None:
    """Write cameras, actions, rewards and events of episodes to an `.rrd` file, each episode below a separate path.

    An existing file is replaced; with `control_freq` (steps per second) there is a time line in seconds, too.

    Raises:
        MissingExtraError: rerun is not installed.
    """
    rr = require("rerun", extra="rerun")
    path.parent.mkdir(parents=True, exist_ok=True)
    recording = rr.RecordingStream("rlvla")
    recording.save(str(path))

    def at(step: int) -> None:
        recording.set_time(_STEP, sequence=step)
        if control_freq:
            recording.set_time(_TIME, duration=step / control_freq)

    for episode in episodes:
        top = f"/{episode.name.replace('/', '_')}"
        about = f"{episode.instruction}\n\n{outcome_text(episode.success)}"
        recording.log(f"{top}/about", rr.TextDocument(about), static=True)
        for camera, frames in episode.frames.items():
            for step, frame in zip(episode.frame_steps, frames):
                at(int(step))
                recording.log(
                    f"{top}/cameras/{camera}", rr.Image(np.ascontiguousarray(frame)).compress(jpeg_quality=90)
                )
        series = {f"actions/{dim}": column for dim, column in enumerate(episode.actions.T)}
        series |= {f"rewards/{name}": values for name, values in episode.rewards.items()}
        series |= {f"events/{name}": held for name, held in episode.events.items()}
        for name, values in series.items():
            for step, value in enumerate(values):
                at(step)
                recording.log(f"{top}/{name}", rr.Scalars(float(value)))
    recording.disconnect()

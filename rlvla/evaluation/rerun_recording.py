"""Recorded episodes for the viewer of rerun.io."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlvla.evaluation.data_page import ViewedEpisode
from rlvla.utils.errors import require

_STEP, _TIME = "step", "episode_time"


def write_recording(path: Path, episodes: Sequence[ViewedEpisode], control_freq: float | None = None) -> None:
    """Write episodes to an `.rrd` file, each below a path of its own: cameras, actions, rewards, events.

    Args:
        path: the file; replaced if it exists.
        episodes: the episodes.
        control_freq: environment steps per second, for a second time line; None: there is none.

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
        words = f"{episode.instruction}\n\n{'success' if episode.success else 'no success'}"
        recording.log(f"{top}/about", rr.TextDocument(words), static=True)
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

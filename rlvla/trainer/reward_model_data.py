"""The episodes a reward model learns from: recorded demonstrations and dumped rollouts, in any mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlvla.trainer.demonstrations import Demonstrations
from rlvla.trainer.joined_demonstrations import read_several

# Options that change what a frame looks like or what its proprio means.
_SAME = ("task_suite_name", "image_size", "render_quality")


def read_outcomes(paths: Sequence[str], cameras: Sequence[str] | None = None) -> Demonstrations:
    """Read one or more files of episodes as one.

    Dumped rollouts hold what was seen after the last action; it becomes the last frame of the episode, so an episode of
    S decisions has S + 1 frames there. `actions` keep one row per step, and `decision_steps` is None.

    Args:
        paths: files that `read_demonstrations` reads.
        cameras: which cameras, in which order; default all of the first file.

    Raises:
        ConfigError: a file cannot be read, or they differ in suite, cameras, image size, proprio, rendering, action
            dimensions or control frequency; all problems at once.
    """
    return read_several(paths, cameras, same=_SAME, prepared=_with_last_frames)


def _with_last_frames(demos: Demonstrations) -> Demonstrations:
    """The observations after the last actions as further frames, where there are any."""
    if demos.last_images is None:
        return demos
    images = [np.concatenate([own, last[None]]) for own, last in zip(demos.images, demos.last_images)]
    proprio = demos.proprio
    if proprio is not None and demos.last_proprio is not None:
        proprio = [np.concatenate([own, last[None]]) for own, last in zip(proprio, demos.last_proprio)]
    return replace(demos, images=images, proprio=proprio, decision_steps=None, last_images=None, last_proprio=None)

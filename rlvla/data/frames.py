"""Training rows of a reward model: frames of episodes with known outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reading import read_several
from rlvla.data.splitting import split_by_state
from rlvla.experience import Experience
from rlvla.models.value_models import RewardModel
from rlvla.utils.seeding import derive_rng

# Options that affect the look of a frame or the meaning of its proprio.
_SAME = ("task_suite_name", "image_size", "render_quality")
_EARLY = 0.5  # in the first half of a successful episode, frames are labeled as "no success yet"


def read_outcomes(paths: Sequence[str], cameras: Sequence[str] | None = None) -> Demonstrations:
    """Read one or more files of episodes as one dataset.

    Dumped rollouts include the observation after the last action; it becomes the last frame of the episode, so that an
    episode of S decisions has S + 1 frames. `actions` keep one row per step, and `decision_steps` is None.

    Args:
        paths: files that `read_demonstrations` can read.
        cameras: names of the cameras in the order wanted; default all cameras of the first file.

    Raises:
        ConfigError: a file cannot be read, or the files differ in suite, cameras, image size, proprio, rendering,
            action dimensions or control frequency; all problems are reported at once.
    """
    return read_several(paths, cameras, same=_SAME, prepared=_with_last_frames)


def _with_last_frames(demos: Demonstrations) -> Demonstrations:
    """Append the observations after the last actions as frames, if they were recorded."""
    if demos.last_images is None:
        return demos
    images = [np.concatenate([frames, last[None]]) for frames, last in zip(demos.images, demos.last_images)]
    proprio = demos.proprio
    if proprio is not None and demos.last_proprio is not None:
        proprio = [np.concatenate([states, last[None]]) for states, last in zip(proprio, demos.last_proprio)]
    return replace(demos, images=images, proprio=proprio, decision_steps=None, last_images=None, last_proprio=None)


@dataclass
class FrameRows:
    """Frames as training rows.

    Attributes:
        inputs: images, proprio and instructions.
        success: [M] 1 or 0; NaN where the label is ambiguous (the second half of a successful episode).
        progress: [M] elapsed fraction of the episode.
        failed: [M] bool, frames of failed episodes, whose progress is only bounded from above.
    """

    inputs: Experience
    success: torch.Tensor
    progress: torch.Tensor
    failed: torch.Tensor

    @classmethod
    def of(cls, demos: Demonstrations, episodes: Sequence[int], model: RewardModel) -> FrameRows:
        """All frames of the given episodes, prepared for the model."""
        success, progress, failed = [], [], []
        for index in episodes:
            steps = len(demos.images[index])
            time = np.linspace(0.0, 1.0, steps) if steps > 1 else np.ones(1)
            if demos.success[index]:
                label = np.where(time < _EARLY, 0.0, np.nan)
                label[-1] = 1.0
            else:
                label = np.zeros(steps)
            success.append(label)
            progress.append(time)
            failed.append(np.full(steps, not demos.success[index]))
        state = None if demos.proprio is None else np.concatenate([demos.proprio[i] for i in episodes])
        images, proprio = model.prepare(np.concatenate([demos.images[i] for i in episodes]), state)
        inputs = Experience(
            images=torch.from_numpy(images),
            proprio=None if proprio is None else torch.from_numpy(proprio),
            instructions=[demos.instructions[i] for i in episodes for _ in range(len(demos.images[i]))],
        )
        columns = [torch.from_numpy(np.concatenate(part)) for part in (success, progress, failed)]
        return cls(inputs, columns[0].float(), columns[1].float(), columns[2])


def split_episodes(demos: Demonstrations, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split into (training, held-out) episodes by initial state; episodes with unknown states are split one by one."""
    return split_by_state(demos, share, derive_rng(seed, "reward model split"), least=1)

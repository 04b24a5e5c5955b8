"""Training rows of a reward model: labelled frames, and pairs of a better and a worse episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlvla.data.demonstrations import UNKNOWN_STATE, Demonstrations, split_by_state
from rlvla.data.image_storage import empty_images
from rlvla.data.options import AS_RECORDED, ReadOptions
from rlvla.data.reading import SUITE, read_several
from rlvla.data.rows import observations_of
from rlvla.experience import Experience
from rlvla.models.value_models import RewardModel
from rlvla.utils.errors import ConfigError
from rlvla.utils.seeding import derive_rng

# Options that affect the appearance of a frame or the meaning of its proprio.
_SAME = (SUITE, "image_size", "render_quality")
_EARLY = 0.5  # in the first half of a successful episode, frames are labeled as "no success yet"


def read_outcomes(
    paths: Sequence[str], cameras: Sequence[str] | None = None, options: ReadOptions = AS_RECORDED
) -> Demonstrations:
    """Read one or more files of episodes as one dataset.

    Dumped rollouts include the observation after the last action; it becomes the last frame of the episode, so that an
    episode of S decisions has S + 1 frames. `actions` keep one row per step, and `decision_steps` is None.

    Raises:
        ConfigError: as `read_parts`; also if the files differ in suite or rendering.
    """
    return read_several(paths, cameras, options=options, same=_SAME, prepared=_with_last_frames)


def _with_last_frames(demos: Demonstrations) -> Demonstrations:
    """Append the observations after the last actions as frames, if they were recorded."""
    if demos.has_corrections:
        text = "corrections show no whole episodes (collect_demos.py --corrections), whose progress could be learned"
        raise ConfigError.of("demos", "mismatch", f"{text}; leave that file out")
    if demos.last_images is None:
        return demos
    lengths = [len(frames) + 1 for frames in demos.images]
    images = empty_images(lengths, demos.images[0].shape[1:], "--demos")
    for joined, frames, last in zip(images, demos.images, demos.last_images):
        joined[:-1], joined[-1] = frames, last
    proprio = demos.proprio
    if proprio is not None and demos.last_proprio is not None:
        proprio = [np.concatenate([states, last[None]]) for states, last in zip(proprio, demos.last_proprio)]
    judged = replace(demos, decision_steps=None, last_images=None, last_proprio=None, step_instructions=None)
    return replace(judged, images=images, proprio=proprio)


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
        """All frames of these episodes, prepared for the model."""
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
        inputs = observations_of(demos, episodes, model)
        columns = [torch.from_numpy(np.concatenate(labels)) for labels in (success, progress, failed)]
        return cls(inputs, columns[0].float(), columns[1].float(), columns[2])


def split_episodes(demos: Demonstrations, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split into (training, held-out) episodes by initial state; episodes with unknown states are split one by one."""
    return split_by_state(demos, share, derive_rng(seed, "reward model split"), least=1)


def ranked_pairs(demos: Demonstrations, episodes: Sequence[int], order: str) -> list[tuple[int, int]]:
    """All pairs (better, worse) of episodes of the same task and instruction; ties are left out.

    Args:
        demos: the episodes.
        episodes: numbers of the episodes to compare.
        order: "success" (success over failure), "length" (also the shorter of two successes), "return" (larger sum of
            the recorded rewards) or "rank" (smaller recorded rank).

    Raises:
        ValueError: the file records no rewards or ranks, but the order needs them.
    """
    merits = {index: _merit(demos, index, order) for index in episodes}
    states = demos.init_states or [UNKNOWN_STATE] * len(demos.actions)
    task = {index: (states[index][0], demos.instructions[index]) for index in episodes}
    return [(i, j) for i in episodes for j in episodes if task[i] == task[j] and merits[i] > merits[j]]


def _merit(demos: Demonstrations, index: int, order: str) -> tuple[float, ...]:
    """Larger for better episodes."""
    success = demos.success[index]
    if order == "success":
        return (float(success),)
    if order == "length":
        return (float(success), -float(len(demos.actions[index])) if success else 0.0)
    if order == "return" and demos.rewards is not None:
        return (float(demos.rewards[index].sum()),)
    if order == "rank" and demos.ranks is not None:
        return (-float(demos.ranks[index]),)
    raise ValueError(f"the file records no {'rewards' if order == 'return' else 'rank of each episode'}")


def spaced_frames(demos: Demonstrations, episode: int, frames: int) -> np.ndarray:
    """Indices of at most `frames` evenly spaced frames of an episode, including the last one."""
    last = len(demos.images[episode]) - 1
    return np.unique(np.linspace(last if frames == 1 else 0, last, frames).round().astype(int))


class EpisodeFrames:
    """A few frames of each episode, prepared for a model.

    Args:
        demos: the episodes.
        episodes: numbers of the episodes.
        frames: maximum number of frames of each.
        model: prepares the frames.

    Attributes:
        rows: the frames of all episodes with their labels.
    """

    def __init__(self, demos: Demonstrations, episodes: Sequence[int], frames: int, model: RewardModel):
        counts = [len(demos.images[index]) for index in episodes]
        starts = np.concatenate([[0], np.cumsum(counts)])
        chosen = [spaced_frames(demos, index, frames) + start for index, start in zip(episodes, starts)]
        everything = FrameRows.of(demos, episodes, model)
        rows = torch.from_numpy(np.concatenate(chosen))
        self.rows = replace(
            everything,
            inputs=everything.inputs.index(rows),
            success=everything.success[rows],
            progress=everything.progress[rows],
            failed=everything.failed[rows],
        )
        ends = np.cumsum([len(indices) for indices in chosen])
        self._of = {index: torch.arange(end - len(indices), end) for index, indices, end in zip(episodes, chosen, ends)}

    def of(self, episodes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [M] of the frames of these episodes, and for each the position [M] of its episode in `episodes`."""
        rows = [self._of[index] for index in episodes]
        sizes = torch.tensor([len(indices) for indices in rows], dtype=torch.long)
        return torch.cat(rows), torch.arange(len(rows)).repeat_interleave(sizes)

"""Pairs of episodes of which one is better, as training data of a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rlvla.data.demonstrations import UNKNOWN_STATE, Demonstrations
from rlvla.data.frames import FrameRows
from rlvla.models.value_models import RewardModel


def ranked_pairs(demos: Demonstrations, episodes: Sequence[int], order: str) -> list[tuple[int, int]]:
    """All pairs (better, worse) of episodes of the same task and instruction; equal ones make no pair.

    Args:
        demos: the episodes.
        episodes: which of them.
        order: "success" (success over failure), "length" (also the shorter of two successes), "return" (larger sum of
            the recorded rewards) or "rank" (smaller recorded rank).

    Raises:
        ValueError: the file does not record what the order needs.
    """
    merits = {index: _merit(demos, index, order) for index in episodes}
    task = {index: (_task(demos, index), demos.instructions[index]) for index in episodes}
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


def _task(demos: Demonstrations, index: int) -> int:
    return (demos.init_states[index] if demos.init_states else UNKNOWN_STATE)[0]


def at_most(demos: Demonstrations, episode: int, frames: int) -> np.ndarray:
    """Indices of at most `frames` frames of an episode, evenly spaced, the last one included."""
    last = len(demos.images[episode]) - 1
    return np.unique(np.linspace(last if frames == 1 else 0, last, frames).round().astype(int))


class EpisodeFrames:
    """A few frames of each episode, prepared for a model.

    Args:
        demos: the episodes.
        episodes: which of them.
        frames: at most so many frames of each.
        model: reads them.

    Attributes:
        rows: the frames of all episodes with their labels.
    """

    def __init__(self, demos: Demonstrations, episodes: Sequence[int], frames: int, model: RewardModel):
        counts = [len(demos.images[index]) for index in episodes]
        starts = np.concatenate([[0], np.cumsum(counts)])
        chosen = [at_most(demos, index, frames) + start for index, start in zip(episodes, starts)]
        everything = FrameRows.of(demos, episodes, model)
        rows = torch.from_numpy(np.concatenate(chosen))
        self.rows = replace(
            everything,
            inputs=everything.inputs.index(rows),
            success=everything.success[rows],
            progress=everything.progress[rows],
            failed=everything.failed[rows],
        )
        ends = np.cumsum([len(part) for part in chosen])
        self._of = {index: torch.arange(end - len(part), end) for index, part, end in zip(episodes, chosen, ends)}

    def of(self, episodes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [M] of the frames of these episodes, and for each the position [M] of its episode in `episodes`."""
        parts = [self._of[index] for index in episodes]
        sizes = torch.tensor([len(part) for part in parts], dtype=torch.long)
        return torch.cat(parts), torch.arange(len(parts)).repeat_interleave(sizes)

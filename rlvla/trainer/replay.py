"""The replay list: decisions of one iteration, cut into optimiser steps by whole episodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from rlvla.experience import Experience


class ReplayList:
    """Holds `Experience` rows until they have been trained on.

    Rows of one episode are never split over optimiser steps.
    """

    def __init__(self) -> None:
        self._parts: list[Experience] = []

    def append(self, experience: Experience) -> None:
        """Add rows; their episodes are numbered on from those already held."""
        held = max((int(part.episode_index.max()) + 1 for part in self._parts), default=0)
        self._parts.append(experience.with_fields(episode_index=experience.episode_index + held))

    def clear(self) -> None:
        """Forget all rows."""
        self._parts.clear()

    def __len__(self) -> int:
        """Rows held."""
        return sum(len(part) for part in self._parts)

    def experience(self) -> Experience:
        """All rows as one batch."""
        if len(self._parts) > 1:
            self._parts = [Experience.cat(self._parts)]
        return self._parts[0]

    def optimizer_steps(self, episodes_per_step: int, rng: np.random.Generator) -> Iterator[Experience]:
        """Shuffle the episodes and yield the rows of `episodes_per_step` of them at a time.

        Rows inside a step are shuffled too, so that micro-batches are alike. The last step takes the remainder.
        """
        everything = self.experience()
        episodes = everything.episode_index.numpy()
        order = rng.permutation(np.unique(episodes))
        for start in range(0, len(order), episodes_per_step):
            rows = np.flatnonzero(np.isin(episodes, order[start : start + episodes_per_step]))
            yield everything.index(torch.from_numpy(rng.permutation(rows)))


def micro_batches(step: Experience, rows: int, count: int) -> Iterator[Experience]:
    """Cut an optimiser step into exactly `count` micro-batches of at most `rows` rows.

    Ranks must run equally many micro-batches; where rows run out, a row with empty masks stands in: it contributes
    nothing to any loss.
    """
    for index in range(count):
        start = index * rows
        if start < len(step):
            yield step.index(torch.arange(start, min(start + rows, len(step))))
        else:
            blank = step.index(torch.zeros(1, dtype=torch.long))
            yield blank.with_fields(
                action_mask=torch.zeros_like(blank.action_mask),
                policy_mask=None if blank.policy_mask is None else torch.zeros_like(blank.policy_mask),
                value_mask=None if blank.value_mask is None else torch.zeros_like(blank.value_mask),
            )

"""Training rows from demonstrations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from rlvla.data.demonstrations import Demonstrations
from rlvla.experience import Experience
from rlvla.models.policy import Policy
from rlvla.utils.seeding import derive_rng


class DemonstrationRows:
    """One training row per observation: the observation and the chunk of A actions that followed it.

    Args:
        demos: the episodes; their images are replaced by views of one array.
        policy: prepares observations and encodes actions.
    """

    def __init__(self, demos: Demonstrations, policy: Policy):
        spec = policy.spec
        traces, masks = [], []
        for index, actions in enumerate(demos.actions):
            starts = np.arange(len(actions)) if demos.decision_steps is None else demos.decision_steps[index]
            steps = starts[:, None] + np.arange(spec.action_chunk_len)  # [S, A]
            ahead = actions[np.minimum(steps, len(actions) - 1)]  # past the end the last action is repeated and masked
            traces.append(policy.encode_actions(ahead))
            masks.append(np.repeat(steps < len(actions), spec.columns_per_action, axis=1))
        proprio = np.concatenate(demos.proprio) if spec.proprio_dim and demos.proprio is not None else None
        images, proprio = policy.prepare(demos.joined_images(), proprio)
        self._rows = Experience(
            images=torch.from_numpy(images),
            proprio=None if proprio is None else torch.from_numpy(proprio),
            instructions=[text for text, seen in zip(demos.instructions, demos.images) for _ in range(len(seen))],
            trace={name: torch.from_numpy(np.concatenate([trace[name] for trace in traces])) for name in traces[0]},
            action_mask=torch.from_numpy(np.concatenate(masks)),
        )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def take(self, rows: np.ndarray) -> Experience:
        """The rows [M] (int64) as a batch; one fully masked row if `rows` is empty."""
        return self._rows.take(torch.from_numpy(rows))

    def batches(self, size: int, epochs: int, seed: int, rank: int = 0, world_size: int = 1) -> Iterator[Experience]:
        """The batches of one rank for all optimizer steps of a run, reshuffled each epoch.

        Args:
            size: rows per step over all ranks, capped at the number of rows; an incomplete last batch is dropped.
            epochs: passes over the rows.
            seed: seed of the shuffles.
            rank: the rank whose part of each batch is returned.
            world_size: number of ranks.
        """
        size = min(size, len(self))
        for epoch in range(epochs):
            order = derive_rng(seed, "sft", epoch).permutation(len(self))
            for start in range(0, len(self) - size + 1, size):
                share = order[start + rank : start + size : world_size]
                yield self._rows.index(torch.from_numpy(share))

"""Adapter that exposes one slot of a batched environment as an `Env`."""

from __future__ import annotations

import numpy as np

from rlvla.envs.base import BatchedEnv, ChunkResult, Observation, check_chunk


class SlotEnv:
    """A view of one slot; see `rlvla.envs.base.Env` for the interface.

    Args:
        batch: the batched environment; closing the view closes it.
        slot: index of the slot.
    """

    def __init__(self, batch: BatchedEnv, slot: int):
        self.task = batch.task
        self._batch, self._slot = batch, slot

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode in the slot."""
        return self._batch.reset([self._slot], [init_state_id], [seed])[0]

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D] in the slot."""
        actions = check_chunk(actions, self.task)
        return self._batch.step_chunk([self._slot], actions[None], record_frames=record_frames)[0]

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state of the slot."""
        return self._batch.privileged_state(self._slot)

    def close(self) -> None:
        """Close the whole environment."""
        self._batch.close()

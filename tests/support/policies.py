"""Policies without a network, for rollouts whose decisions a test writes down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvla.models.policy import Decision, PolicySpec


class ScriptedPolicy:
    """Decides what `actions` and `tokens` say; both are zero unless a subclass says more.

    Args:
        action_chunk_len: A.
        action_dim: D; a decision has A * D tokens, each with log-prob 0.

    Attributes:
        prepared: how often an observation was prepared.
        batches: size of each batch that was decided.
    """

    def __init__(self, action_chunk_len: int, action_dim: int):
        tokens = action_chunk_len * action_dim
        self.spec = PolicySpec(action_chunk_len, action_dim, columns=tokens, noise_shape=(tokens,))
        self.prepared = 0
        self.batches: list[int] = []

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """The observation itself."""
        self.prepared += 1
        return images, proprio

    def actions(self, images: np.ndarray, proprio: np.ndarray | None, noise: np.ndarray | None) -> np.ndarray:
        """[B, A, D] float32."""
        return np.zeros((len(images), self.spec.action_chunk_len, self.spec.action_dim), np.float32)

    def tokens(self, images: np.ndarray, proprio: np.ndarray | None, noise: np.ndarray | None) -> np.ndarray:
        """[B, K] integers."""
        return np.zeros((len(images), self.spec.columns))

    def act(
        self,
        images: np.ndarray,
        proprio: np.ndarray | None,
        instructions: Sequence[str],
        *,
        noise: np.ndarray | None,
        temperature: float = 1.0,
    ) -> Decision:
        """See `RolloutPolicy.act`."""
        self.batches.append(len(images))
        tokens = self.tokens(images, proprio, noise).astype(np.int64)
        actions = self.actions(images, proprio, noise).astype(np.float32)
        return Decision(actions, np.zeros(tokens.shape, np.float32), {"tokens": tokens})

"""The interface of policies and critics that soft actor-critic trains.

Shapes: B rows, M critics, n action primitives (1 without), D parameters of a primitive (of a whole chunk without
primitives), E numbers of a stored decision, P proprio, G goals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from rlvla.experience import Sample
from rlvla.models.compact.text import Sentences
from rlvla.models.policy import RolloutPolicy


@dataclass(frozen=True)
class MatchingBatch:
    """Stored decisions on which the flow-matching loss of an actor is computed.

    Attributes:
        actions: [B, E].
        steps: [B] int64, executed actions of each decision; the others do not count.
        noise: [B, `SACPolicy.matching_noise`] standard normal.
    """

    actions: Tensor
    steps: Tensor
    noise: Tensor


class SampledDecisions(NamedTuple):
    """Reparameterized decisions of a policy for each primitive.

    Attributes:
        parameters: [B, n, D] in [-1, 1], 0 where unused.
        log_densities: [B, n, D], 0 where unused; of a flow given its initial noise.
        choice: [B, n] log-probs of the primitives, or None without.
        matching_losses: [B] flow-matching losses of a `MatchingBatch`, or None without.
    """

    parameters: Tensor
    log_densities: Tensor
    choice: Tensor | None
    matching_losses: Tensor | None = None


class StoredSizes(Protocol):
    """Sizes of a decision in the replay buffer, for policy and critics together.

    Attributes:
        action_chunk_len: A, actions per decision.
        action_width: E, numbers of a stored decision.
        proprio_dim: P; 0: no proprio.
        num_images_in_input: N, cameras; 0: no images.
        image_size: side of the square images in pixels.
        text_width: 0: instructions are not read.
        goals: G, goals whose one-hot vectors follow the proprio; 0: none.
    """

    # ruff: noqa: D102
    @property
    def action_chunk_len(self) -> int: ...
    @property
    def action_width(self) -> int: ...
    @property
    def proprio_dim(self) -> int: ...
    @property
    def num_images_in_input(self) -> int: ...
    @property
    def image_size(self) -> int: ...
    @property
    def text_width(self) -> int: ...
    @property
    def goals(self) -> int: ...


@runtime_checkable
class SACCritic(Protocol):
    """An ensemble of M critics Q(s, a); it must also be an `nn.Module` whose parameters are all trained."""

    def __call__(
        self,
        actions: Tensor,
        proprio: Tensor | None,
        images: Tensor | None,
        sentences: Sentences | None,
        critics: Tensor | None = None,
    ) -> Tensor:
        """Q-values [M, B] of decisions [B, E], or [M, B, n] of [B, n, E].

        Args:
            actions: see `SACPolicy.critic_actions`.
            proprio: [B, P + G] as stored, see `with_goals`.
            images: [B, N, H, W, 3] uint8.
            sentences: from `SACPolicy.sentences`.
            critics: [m] int64, evaluate only these; None: all M.
        """
        ...

    def proprio_normalization(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [P] by which stored proprio is normalized; P = 0 without proprio."""
        ...

    def set_proprio_normalization(self, mean: Tensor, std: Tensor) -> None:
        """Normalize stored proprio by this mean and standard deviation, [P] each."""
        ...


@runtime_checkable
class SACPolicy(RolloutPolicy, Protocol):
    """A policy pi(k | s) pi(x | s, k) over primitives k with parameters x in [-1, 1]; it must also be an `nn.Module`.

    Without primitives n is 1 and k is fixed. Policy and critics read the same stored observations; critics may read
    more proprio and no images (asymmetric actor-critic). The trace of a decision is `action` [E].

    Attributes:
        random_actions: sampled decisions ignore the network (exploration at the start of a run); greedy ones do not.
        random_primitives: sampled decisions draw the primitive uniformly, with parameters from the network.
    """

    random_actions: bool
    random_primitives: bool

    @property
    def has_primitives(self) -> bool:
        """Whether a decision chooses a primitive."""
        ...

    @property
    def parameter_mask(self) -> Tensor:
        """[n, D] bool: the parameters that each primitive has."""
        ...

    @property
    def noise_width(self) -> int:
        """W, standard normal numbers of a sampled decision for each primitive."""
        ...

    @property
    def matching_noise(self) -> int:
        """Standard normal numbers of a row of the flow-matching loss; 0: the policy is not a flow."""
        ...

    @property
    def stored_sizes(self) -> StoredSizes:
        """Sizes of the replay buffer."""
        ...

    @property
    def base_files(self) -> dict[str, str]:
        """Name -> SHA-256 of files besides the weights on which decisions and stored observations depend."""
        ...

    def new_critic(self, n_critics: int) -> SACCritic:
        """Critics with random weights from the global generator."""
        ...

    def __call__(
        self,
        proprio: Tensor | None,
        images: Tensor | None,
        sentences: Sentences | None,
        noise: Tensor,
        matching: MatchingBatch | None = None,
    ) -> SampledDecisions:
        """Sample a reparameterized decision for each primitive.

        Args:
            proprio: [B, .] from `policy_proprio`.
            images: [B, N, H, W, 3] uint8.
            sentences: from `sentences`.
            noise: [B, n, W] standard normal.
            matching: stored decisions at the same observations, for the flow-matching loss; None: no such loss.
        """
        ...

    def critic_actions(self, parameters: Tensor, primitives: Tensor | None) -> Tensor:
        """Decisions [..., E] as critics and the replay buffer read them.

        Args:
            parameters: [..., D].
            primitives: [...] int64; None without primitives.
        """
        ...

    def entropies(self, log_probs: Tensor, choice: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Single-sample estimates [B] of the entropies of parameters and choice.

        Args:
            log_probs: [B, n] log-densities, summed over D.
            choice: [B, n] log-probs of the primitives; None without.
        """
        ...

    def sentences(self, instructions: Sequence[str]) -> Sentences | None:
        """Encoded instructions on the policy's device; None if they are not read."""
        ...

    def policy_proprio(self, proprio: Tensor) -> Tensor:
        """The policy's part of stored proprio [..., P + G] (or of statistics [..., P]); goals are kept."""
        ...

    def set_proprio_normalization(self, mean: Tensor, std: Tensor) -> None:
        """Normalize proprio by the mean and standard deviation [P] of stored proprio."""
        ...

    def stored_observations(self, samples: Sequence[Sample]) -> list[dict[str, np.ndarray]]:
        """Observations of each episode for the replay buffer, including the final one.

        Returns:
            Per episode `proprio` [S + 1, P] and `images` [S + 1, N, H, W, 3], each only if it is read.
        """
        ...

    def encode_actions(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """`action` [..., E] of environment actions [..., A, D], e.g. of demonstrations."""
        ...


def with_goals(proprio: Tensor, goals: Tensor, count: int) -> Tensor:
    """[B, P + G]: proprio [B, P] followed by the one-hot vectors of goals [B] int64, of which there are `count` G."""
    return torch.cat([proprio, one_hot(goals, count).to(proprio.dtype)], 1)

"""The frozen policy that the KL penalty measures against."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.models.config import ActorConfig


class ReferenceModel(nn.Module):
    """A policy without gradients.

    Args:
        actor: the policy to hold fast; its parameters are frozen in place, unless `without_adapters`.
        without_adapters: the actor is the one that is trained, and its LoRA adapters are all that changes: with them
            disabled it is the start policy, and no second copy of the weights is needed.
    """

    def __init__(self, actor: Actor, *, without_adapters: bool = False):
        super().__init__()
        self.without_adapters = without_adapters
        if without_adapters:
            object.__setattr__(self, "actor", actor)  # not a part: its owner places, shards and trains it
        else:
            self.actor = actor.requires_grad_(False).eval()

    @classmethod
    def from_pretrained(
        cls, path: str | Path, unnorm_key: str | None = None, config: ActorConfig | None = None, **overrides: Any
    ) -> ReferenceModel:
        """Load a checkpoint folder; arguments and errors as `Actor.from_pretrained`."""
        return cls(Actor.from_pretrained(path, config, unnorm_key, **overrides))

    def log_probs(self, batch: Experience, temperature: float) -> torch.Tensor:
        """[B, T] log-probabilities of the batch's tokens."""
        return self._pass(batch, temperature)[0]

    def all_log_probs(self, batch: Experience, temperature: float) -> torch.Tensor:
        """[B, T, 256] log-probabilities of every action token."""
        return self._pass(batch, temperature, all_columns=True)

    @torch.no_grad()
    def _pass(self, batch: Experience, temperature: float, **more: bool) -> Any:
        with self.actor.adapters_disabled() if self.without_adapters else nullcontext():
            return self.actor(**self.actor.score(batch, temperature), **more)

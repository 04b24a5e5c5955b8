"""The frozen reference policy of the KL penalty."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlvla.experience import Experience
from rlvla.models.config import ActorConfig
from rlvla.models.policy import parameters_of

if TYPE_CHECKING:
    from rlvla.models.actor import Actor


class ReferenceModel(nn.Module):
    """A policy without gradients.

    Args:
        actor: the reference policy; its parameters are frozen in place, unless `without_adapters`.
        without_adapters: `actor` is the policy being trained, with LoRA. Disabling the adapters recovers the initial
            policy, so no second copy of the weights is needed.
    """

    def __init__(self, actor: Actor, *, without_adapters: bool = False):
        super().__init__()
        self.without_adapters = without_adapters
        if without_adapters:
            object.__setattr__(self, "actor", actor)  # not a submodule: the trainer places, shards and trains it
        else:
            self.actor = actor.requires_grad_(False).eval()

    @classmethod
    def from_pretrained(
        cls, path: str | Path, unnorm_key: str | None = None, config: ActorConfig | None = None, **overrides: Any
    ) -> ReferenceModel:
        """Load a checkpoint folder; arguments and errors as in `Actor.from_pretrained`."""
        from rlvla.models.actor import Actor

        return cls(Actor.from_pretrained(path, config, unnorm_key, **overrides))

    def log_probs(self, batch: Experience, temperature: float) -> Tensor:
        """[B, K] log-probabilities of the batch's decisions."""
        return self._pass(batch, temperature, "log_probs")["log_probs"]

    def parameters_of(self, batch: Experience, temperature: float) -> dict[str, Tensor]:
        """Parameters of the decisions' distributions, name -> [B, ...]; see `ActionDistribution.kl`."""
        return parameters_of(self._pass(batch, temperature, "parameters"))

    @torch.no_grad()
    def _pass(self, batch: Experience, temperature: float, *wants: str) -> dict[str, Tensor]:
        with self.actor.adapters_disabled() if self.without_adapters else nullcontext():
            return self.actor(**self.actor.score(batch, temperature), wants=wants)

"""What training needs and playing does not waits in host memory while episodes are played."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rlvla.utils.strategy import Engine


class Offloading:
    """Moves optimizer states, critic, reference and reward model off the accelerator and back.

    Args:
        enabled: otherwise everything stays where it is.
        actor: its weights stay, for they are what plays.
        critic: None where there is none, or where it shares the actor's network.
        reference: frozen, or None.
        reward_model: frozen, or None; it comes back for the moment in which it judges.
        device: of the strategy.
    """

    def __init__(
        self,
        enabled: bool,
        actor: Engine,
        critic: Engine | None,
        reference: nn.Module | None,
        reward_model: nn.Module | None,
        device: torch.device,
    ):
        self._enabled, self._actor, self._critic = enabled, actor, critic
        self._frozen = [model for model in (reference, reward_model) if model is not None]
        self._reward_model, self._device = reward_model, device

    @contextmanager
    def during_rollout(self) -> Iterator[None]:
        """Everything is away inside the block, and back behind it, whatever happens."""
        if not self._enabled:
            yield
            return
        try:
            self._actor.offload_states()
            if self._critic is not None:
                self._critic.offload_states(weights=True)
            for model in self._frozen:
                model.to("cpu")
            yield
        finally:
            for engine in (self._actor, self._critic):
                if engine is not None:
                    engine.reload_states()
            for model in self._frozen:
                model.to(self._device)

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Within `during_rollout`: the reward model is back for the time of the block."""
        if not self._enabled or self._reward_model is None:
            yield
            return
        self._reward_model.to(self._device)
        yield
        self._reward_model.to("cpu")

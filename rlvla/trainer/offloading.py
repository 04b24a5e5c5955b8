"""What training needs and playing does not waits in host memory while episodes are played."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlvla.trainer.run_models import Models
from rlvla.utils.strategy import DeepspeedStrategy, Engine

HOST = torch.device("cpu")


class Offloading:
    """Moves optimizer states, critic, reference and reward model off the accelerator and back.

    Args:
        enabled: otherwise everything stays where it is.
        actor: its weights stay, for they are what plays.
        critic: None where there is none, or where it shares the actor's network.
        models: the frozen ones of these move; the reward model comes back for the moment in which it judges.
        strategy: knows how a frozen model is moved, and where to.
    """

    def __init__(
        self,
        enabled: bool,
        actor: Engine,
        critic: Engine | None,
        models: Models,
        strategy: DeepspeedStrategy,
    ):
        self._enabled, self._actor, self._critic = enabled, actor, critic
        self._frozen, self._reward_model = models.frozen, models.reward_model
        self._strategy = strategy

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
                self._strategy.move_frozen(model, HOST)
            yield
        finally:
            for engine in (self._actor, self._critic):
                if engine is not None:
                    engine.reload_states()
            for model in self._frozen:
                self._strategy.move_frozen(model, self._strategy.device)

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Within `during_rollout`: the reward model is back for the time of the block."""
        if not self._enabled or self._reward_model is None:
            yield
            return
        self._strategy.move_frozen(self._reward_model, self._strategy.device)
        yield
        self._strategy.move_frozen(self._reward_model, HOST)

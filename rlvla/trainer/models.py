"""The networks of a run: offloading during rollouts, the moving average of the policy's weights, its noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlvla.models.reference import ReferenceModel
from rlvla.trainer.config import LoopBatchConfig
from rlvla.trainer.observers import Observer, OptimizerStep
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

if TYPE_CHECKING:
    from rlvla.models.actor import Actor
    from rlvla.models.value_models import Critic

HOST = torch.device("cpu")


class LoopModels:
    """The networks that the training loop reads.

    Attributes:
        actor: the policy, a `Policy` and `nn.Module`.
        overrides: the run's settings of the policy in place of its folder's, see `check_checkpoint`.
        frozen: separate networks that are never trained, each as the module whose `forward` is called.
    """

    actor: Any
    overrides: Mapping[str, Any] = MappingProxyType({})

    @property
    def frozen(self) -> list[nn.Module]:
        """None."""
        return []


@dataclass
class Models(LoopModels):
    """The networks of a run; `critic` and `reference` are None if not used."""

    actor: Actor
    critic: Critic | None
    reference: ReferenceModel | None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def frozen(self) -> list[nn.Module]:
        """The reference, unless it is the actor without its adapters."""
        if self.reference is None or self.reference.without_adapters:
            return []
        return [self.reference.actor]


class Offloading:
    """Moves optimizer states, critic and reference to host memory during rollouts.

    Args:
        enabled: if False, nothing is moved.
        engines: the trained models; the weights of "actor" stay, since it plays the episodes.
        models: the networks, of which the frozen ones are moved.
        strategy: moves frozen models.
    """

    def __init__(
        self,
        enabled: bool,
        engines: Mapping[str, Engine],
        models: LoopModels,
        strategy: DeepspeedStrategy,
    ):
        self._enabled, self._engines = enabled, engines
        self._frozen, self._strategy = models.frozen, strategy

    @contextmanager
    def during_rollout(self) -> Iterator[None]:
        """Inside the block everything is offloaded; it is moved back afterwards, also after an error."""
        if not self._enabled:
            yield
            return
        try:
            for name, engine in self._engines.items():
                engine.offload_states(weights=name != "actor")
            for model in self._frozen:
                self._strategy.move_frozen(model, HOST)
            yield
        finally:
            for engine in self._engines.values():
                engine.reload_states()
            for model in self._frozen:
                self._strategy.move_frozen(model, self._strategy.device)


class WeightAverage(Observer):
    """Exponential moving average of an engine's trainable weights, updated after each optimizer step.

    average <- beta * average + (1 - beta) * weights, always in float32: in bfloat16 the contribution of a single step
    would be rounded away. The average starts at the initial weights.

    Args:
        engine: an engine with complete parameters on each rank (ZeRO 0 to 2).
        beta: decay in (0, 1).
    """

    def __init__(self, engine: Engine, beta: float):
        self._engine, self._beta = engine, beta
        self._average = {name: p.detach().float().clone() for name, p in self._weights()}

    def _weights(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad]

    def after_step(self, step: OptimizerStep) -> None:
        """Update the average after a step of the actor, unless the step was skipped."""
        if step.model == "actor" and math.isfinite(step.norm):
            self.update()

    @torch.no_grad()
    def update(self, steps: int | None = None) -> None:
        """Update the average with the current weights.

        Args:
            steps: optimizer steps before this one. The decay then is (1 + steps) / (10 + steps), as long as that is
                less, so that a short run does not end near its start. None: always the same decay.
        """
        beta = self._beta if steps is None else min(self._beta, (1 + steps) / (10 + steps))
        for name, p in self._weights():
            self._average[name].lerp_(p.float(), 1.0 - beta)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Inside the block the module has the average as its weights; afterwards its weights are restored exactly."""
        weights = {name: p.detach().clone() for name, p in self._weights()}
        try:
            self._put(self._average)
            yield
        finally:
            self._put(weights)

    @torch.no_grad()
    def _put(self, values: dict[str, torch.Tensor]) -> None:
        for name, p in self._weights():
            p.copy_(values[name])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The average by parameter name, on the CPU; equal on all ranks."""
        return {name: tensor.cpu() for name, tensor in self._average.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore a `state_dict`."""
        for name, tensor in self._average.items():
            tensor.copy_(state[name])


def anneal_noise(actor: Engine, batch: LoopBatchConfig, iteration: int) -> dict[str, float]:
    """Set the noise level of the decisions of an iteration, counted from 0, if it is annealed; returns the metric.

    Linear from that of the policy in the first iteration to --flow_noise_level_end in the last.
    """
    if batch.flow_noise_level_end is None:
        return {}
    progress = batch.progress(iteration)
    return {"actor/noise_level": actor.module.anneal_noise(batch.flow_noise_level_end, progress)}

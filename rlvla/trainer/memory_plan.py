"""Where the memory of a rank goes: weights, gradients, optimizer, activations, rollout; in bytes.

The sizes of DeepSpeed's own buffers were taken from engines of every stage (`benchmarks/memory_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlvla.trainer.memory_probe import Probe
from rlvla.utils.strategy import bucket_elements
from rlvla.utils.strategy_config import StrategyConfig

FLOAT32 = 4  # bytes; optimizer states and master copies
# DeepSpeed's ZeRO-3 steps on parts of at most so many elements, and holds at most so many gathered ones for a pass.
ZERO3_ELEMENTS = 1_000_000_000


@dataclass(frozen=True)
class FrozenMemory:
    """A model on one rank that is never trained.

    Attributes:
        weights: held all the time.
        small: whole copies of small parameters, which ZeRO-3 does not give up after their first use.
        gathered: most of them that ZeRO-3 has brought together besides, or that have come from the host, for a pass.
        whole: the same for a rollout, which takes all of them.
        host: `weights`, if they are kept in host memory.
    """

    weights: int
    small: int = 0
    gathered: int = 0
    whole: int = 0
    host: frozenset[str] = frozenset()

    @property
    def at_rest(self) -> int:
        """Bytes between passes, on device and host together."""
        return self.weights + self.small

    @property
    def on_host(self) -> int:
        """Bytes in host memory."""
        return self.weights if self.host else 0


@dataclass(frozen=True)
class EngineMemory:
    """A trained model on one rank.

    Attributes:
        weights: held all the time.
        small: as in `FrozenMemory`.
        master: float32 copies that the optimizer steps on.
        optimizer: Adam's two moments.
        gradients: held at the end of the backward pass.
        buffers: of the reduction of gradients over ranks.
        gathered: as there.
        whole: as there.
        activations: most that a micro-batch holds beyond all of these.
        step: most that the optimizer step holds beyond weights, master, optimizer and gradients.
        keeps_buffers: buffers (and gradients) are held between updates as well.
        host: names of the parts above that are kept in host memory.
    """

    weights: int
    small: int
    master: int
    optimizer: int
    gradients: int
    buffers: int
    gathered: int
    whole: int
    activations: int
    step: int
    keeps_buffers: bool
    host: frozenset[str] = frozenset()

    @property
    def on_host(self) -> int:
        """Bytes of the parts in host memory."""
        return sum(getattr(self, part) for part in self.host)

    @property
    def at_rest(self) -> int:
        """Bytes between updates, on device and host together."""
        states = self.weights + self.small + self.master + self.optimizer
        return states + self.keeps_buffers * (self.gradients + self.buffers)

    @property
    def update_peak(self) -> int:
        """Most bytes while it is trained."""
        held = self.weights + self.small + self.master + self.optimizer + self.gradients
        late = self.buffers if self.keeps_buffers else 0
        return held + max(self.buffers + self.gathered + self.activations, late + self.step)


def engine_memory(probe: Probe, strategy: StrategyConfig, world: int, *, accumulates: bool) -> EngineMemory:
    """Memory of a model that DeepSpeed trains.

    Args:
        probe: the model.
        strategy: ZeRO stage, precision, offload.
        world: ranks.
        accumulates: an optimizer step has several micro-batches.
    """
    stage, width, trainable = strategy.engine_stage, 2 if strategy.bf16 else FLOAT32, probe.trainable
    share = trainable if stage == 0 else -(-trainable // world)
    held = frozen_memory(probe, strategy, world)
    master = FLOAT32 * share if stage else 0
    gradients = FLOAT32 * (share if stage >= 2 else trainable)
    buffers = width * bucket_elements(trainable)
    if stage == 0:
        activations = probe.backward_bytes if accumulates else max(0, probe.first_backward_bytes - gradients)
        # The reduction flattens the gradients when the activations are gone already.
        step, buffers = buffers, 0
    elif stage == 3:
        activations = probe.bare_backward_bytes
        step = 3 * FLOAT32 * min(share, ZERO3_ELEMENTS)
    else:
        activations = probe.bare_backward_bytes
        step = share * (width + FLOAT32 + (FLOAT32 if strategy.bf16 else 0))
    if strategy.adam_offload:
        master += FLOAT32 * share  # gradients as the optimizer on the host reads them
        if stage < 3:  # new weights on their way back; in float32 also gradients of the micro-batches before the last
            master += width * share * (1 + (accumulates and not strategy.bf16))
    return EngineMemory(
        weights=held.weights,
        small=held.small,
        master=master,
        optimizer=2 * FLOAT32 * share,
        gradients=gradients,
        buffers=buffers,
        gathered=held.gathered,
        whole=held.whole,
        activations=activations,
        step=step,
        keeps_buffers=stage == 3,
        host=held.host | (frozenset({"master", "optimizer"}) if strategy.adam_offload else frozenset()),
    )


def frozen_memory(probe: Probe, strategy: StrategyConfig, world: int) -> FrozenMemory:
    """Memory of the parameters of a model alone, trained or not."""
    if strategy.engine_stage < 3:
        return FrozenMemory(probe.weight_bytes)
    width = 2 if strategy.bf16 else FLOAT32
    # With one rank, and all of it on the device, there is nothing to bring together.
    whole = probe.weight_bytes if world > 1 or strategy.param_offload else 0
    small = min(whole, width * probe.small)
    host = frozenset({"weights"}) if strategy.param_offload else frozenset()
    gathered = min(whole - small, ZERO3_ELEMENTS * width)
    return FrozenMemory(-(-probe.weight_bytes // world), small, gathered, whole - small, host)


@dataclass
class MemoryPlan:
    """Memory of one rank.

    Attributes:
        engines: trained models by name.
        frozen: models that are never trained, by name.
        average: moving average of the actor.
        rollout_pass: most that a forward pass without gradients holds.
        episodes: what the episodes of an iteration hold in host memory.
        demonstrations: what the demonstrations of a supervised loss hold in host memory.
    """

    engines: dict[str, EngineMemory]
    frozen: dict[str, FrozenMemory] = field(default_factory=dict)
    average: int = 0
    rollout_pass: int = 0
    episodes: int = 0
    demonstrations: int = 0

    @property
    def _models(self) -> list[EngineMemory | FrozenMemory]:
        return [*self.engines.values(), *self.frozen.values()]

    @property
    def _base(self) -> int:
        return sum(model.at_rest - model.on_host for model in self._models) + self.average

    @property
    def at_rollout(self) -> int:
        """Most bytes on the device while episodes are played and judged, and then scored by one model after the other.

        The actor stays whole while reward models judge.
        """
        playing = self.engines["actor"].whole if "actor" in self.engines else 0
        playing += max(
            (self.frozen[name].gathered for name in ("reward model", "rm_model") if name in self.frozen), default=0
        )
        return self._base + self.rollout_pass + max(playing, *(model.gathered for model in self._models))

    @property
    def at_update(self) -> int:
        """Most bytes on the device while models are trained, one after the other."""
        return self._base + max((engine.update_peak - engine.at_rest for engine in self.engines.values()), default=0)

    @property
    def on_host(self) -> int:
        """Bytes in host memory: episodes, demonstrations, and parts of models that were sent there."""
        return self.episodes + self.demonstrations + sum(model.on_host for model in self._models)

    def rows(self) -> list[tuple[str, int]]:
        """Name and bytes of every part, zeros left out."""
        found: list[tuple[str, int]] = []
        for name, e in self.engines.items():
            parts = {
                "weights": e.weights,
                "small parameters, whole": e.small,
                "master": e.master,
                "optimizer": e.optimizer,
                "gradients": e.gradients,
                "buffers of the gradient reduction": e.buffers,
                "gathered parameters": e.gathered,
                "activations of a micro-batch": e.activations,
                "buffers of the optimizer step": e.step,
            }
            titles = {"master": "float32 master copy", "optimizer": "optimizer states"}
            for part, size in parts.items():
                found.append((f"{name}: {titles.get(part, part)}{' (host)' if part in e.host else ''}", size))
        if "actor" in self.engines:
            found.append(("actor: whole while it plays", self.engines["actor"].whole))
        for name, model in self.frozen.items():
            found.append((f"{name}: weights{' (host)' if model.host else ''}", model.weights))
            found.append((f"{name}: small parameters, whole", model.small))
            found.append((f"{name}: gathered parameters", model.gathered))
        found += [("moving average of the actor", self.average), ("forward pass without gradients", self.rollout_pass)]
        found += [("episodes of an iteration (host)", self.episodes), ("demonstrations (host)", self.demonstrations)]
        return [(name, size) for name, size in found if size]

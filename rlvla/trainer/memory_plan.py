"""Where the memory of a rank goes: weights, gradients, optimizer, activations, rollout; in bytes.

The sizes of DeepSpeed's own buffers were taken from engines of every stage (`benchmarks/memory_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlvla.trainer.memory_probe import Probe
from rlvla.utils.strategy import StrategyConfig, bucket_elements

FLOAT32 = 4  # bytes; optimizer states and master copies
# DeepSpeed's ZeRO-3 steps on parts of at most so many elements, and holds at most so many gathered ones for a pass.
ZERO3_ELEMENTS = 1_000_000_000


@dataclass(frozen=True)
class EngineMemory:
    """A trained model on one rank.

    Attributes:
        weights: held all the time.
        master: float32 copies that the optimizer steps on.
        optimizer: Adam's two moments.
        gradients: held at the end of the backward pass.
        buffers: of the reduction of gradients over ranks.
        gathered: whole parameters of ZeRO-3 while it plays or computes.
        activations: most that a micro-batch holds beyond all of these.
        step: most that the optimizer step holds beyond weights, master, optimizer and gradients.
        on_host: master, optimizer and their gradients stay in host memory.
        keeps_buffers: buffers (and gradients) are held between updates as well.
    """

    weights: int
    master: int
    optimizer: int
    gradients: int
    buffers: int
    gathered: int
    activations: int
    step: int
    on_host: int
    keeps_buffers: bool

    @property
    def at_rest(self) -> int:
        """Bytes between updates."""
        return self.weights + self.master + self.optimizer + self.keeps_buffers * (self.gradients + self.buffers)

    @property
    def update_peak(self) -> int:
        """Most bytes while it is trained."""
        held = self.weights + self.master + self.optimizer + self.gradients
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
    stage, width, trainable = strategy.zero_stage, 2 if strategy.bf16 else FLOAT32, probe.trainable
    share = trainable if stage == 0 else -(-trainable // world)
    weights, gathered = probe.weight_bytes, 0
    if stage == 3:
        weights = -(-weights // world)
        gathered = min(probe.weight_bytes, ZERO3_ELEMENTS * width) if world > 1 else 0
    master = FLOAT32 * share if stage or strategy.bf16 else 0
    gradients = width * (share if stage >= 2 else trainable)
    buffers = width * bucket_elements(trainable)
    if stage == 0:
        activations = probe.backward_bytes if accumulates else max(0, probe.first_backward_bytes - gradients)
        # The reduction flattens the gradients when the activations are gone already.
        step = max(buffers, FLOAT32 * trainable if strategy.bf16 else 0)
        buffers = 0
    elif stage == 3:
        activations = probe.bare_backward_bytes
        step = 3 * FLOAT32 * min(share, ZERO3_ELEMENTS)
    else:
        activations = probe.bare_backward_bytes
        step = share * (width + FLOAT32 + (FLOAT32 if strategy.bf16 else 0))
    optimizer = 2 * FLOAT32 * share
    if strategy.adam_offload:
        master += FLOAT32 * share  # gradients as the optimizer on the host reads them
    on_host = master + optimizer if strategy.adam_offload else 0
    return EngineMemory(
        weights, master, optimizer, gradients, buffers, gathered, activations, step, on_host, stage == 3
    )


@dataclass
class MemoryPlan:
    """Memory of one rank.

    Attributes:
        engines: trained models by name.
        frozen: weights of models that are never trained, by name.
        average: moving average of the actor.
        rollout_pass: most that a forward pass without gradients holds.
        episodes: what the episodes of an iteration hold in host memory.
    """

    engines: dict[str, EngineMemory]
    frozen: dict[str, int] = field(default_factory=dict)
    average: int = 0
    rollout_pass: int = 0
    episodes: int = 0

    @property
    def _base(self) -> int:
        held = sum(engine.at_rest - engine.on_host for engine in self.engines.values())
        return held + sum(self.frozen.values()) + self.average

    @property
    def at_rollout(self) -> int:
        """Bytes on the device while episodes are played and scored."""
        return self._base + self.rollout_pass + max((engine.gathered for engine in self.engines.values()), default=0)

    @property
    def at_update(self) -> int:
        """Most bytes on the device while models are trained, one after the other."""
        return self._base + max((engine.update_peak - engine.at_rest for engine in self.engines.values()), default=0)

    @property
    def on_host(self) -> int:
        """Bytes in host memory: episodes, and optimizer states that were sent there."""
        return self.episodes + sum(engine.on_host for engine in self.engines.values())

    def rows(self) -> list[tuple[str, int]]:
        """Name and bytes of every part, zeros left out."""
        found: list[tuple[str, int]] = []
        for name, e in self.engines.items():
            where = " (host)" if e.on_host else ""
            parts = {
                "weights": e.weights,
                f"float32 master copy{where}": e.master,
                f"optimizer states{where}": e.optimizer,
                "gradients": e.gradients,
                "buffers of the gradient reduction": e.buffers,
                "gathered parameters": e.gathered,
                "activations of a micro-batch": e.activations,
                "buffers of the optimizer step": e.step,
            }
            found += [(f"{name}: {part}", size) for part, size in parts.items()]
        found += [(f"{name}: weights", size) for name, size in self.frozen.items()]
        found += [("moving average of the actor", self.average), ("forward pass without gradients", self.rollout_pass)]
        found += [("episodes of an iteration (host)", self.episodes)]
        return [(name, size) for name, size in found if size]

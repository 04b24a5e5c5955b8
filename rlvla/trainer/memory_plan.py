"""Where the memory of a rank goes: weights, gradients, optimizer, activations, rollout; in bytes.

The sizes of DeepSpeed's own buffers were taken from engines of every stage (`benchmarks/memory_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlvla.trainer.memory_probe import Probe
from rlvla.utils.strategy import bucket_elements
from rlvla.utils.strategy_config import StrategyConfig

FLOAT32 = 4  # bytes; optimizer states and master copies
# DeepSpeed's ZeRO-3 steps on parts of at most so many elements, and holds at most so many gathered ones for a pass.
ZERO3_ELEMENTS = 1_000_000_000
# So many elements ZeRO-3 gathers at once ahead of their use, into one buffer; each is then copied out of it.
ZERO3_PREFETCH = 50_000_000
# A gradient in float32, and the two intermediate results of AdamW (root of the second moment, divided).
ADAM_BYTES = 3 * FLOAT32


@dataclass(frozen=True)
class FrozenMemory:
    """A model on one rank that is never trained.

    Attributes:
        weights: held all the time.
        small: whole copies of small parameters, which ZeRO-3 does not give up after their first use.
        gathered: most of them that ZeRO-3 has brought together besides, or that have come from the host, for a pass.
        gathering: buffer through which the last of these came from other ranks, until all in it are used.
        whole: as `gathered`, for a rollout, which takes all of them.
        host: `weights`, if they are kept in host memory.
    """

    weights: int
    small: int = 0
    gathered: int = 0
    gathering: int = 0
    whole: int = 0
    host: frozenset[str] = frozenset()

    @property
    def at_rest(self) -> int:
        """Bytes between passes, on device and host together."""
        return self.weights + self.small

    @property
    def on_host(self) -> int:
        """Bytes in host memory, at any time."""
        return self.weights if self.host else 0

    @property
    def peak_on_host(self) -> int:
        """Most bytes in host memory."""
        return self.on_host

    @property
    def away(self) -> int:
        """Bytes that leave the device with --offload_during_rollout."""
        return self.at_rest - self.on_host


@dataclass(frozen=True)
class EngineMemory:
    """A trained model on one rank.

    Attributes:
        weights: held all the time.
        trained: those with a gradient.
        small: as in `FrozenMemory`.
        master: float32 copies that the optimizer steps on.
        optimizer: Adam's two moments.
        gradients: held at the end of the backward pass.
        late: there are no gradients but those in `buffers` as long as there are activations.
        buffers: of the reduction of gradients over ranks.
        reduction: most that is held beside `buffers` while gradients are reduced, when the activations are gone.
        gathered: as in `FrozenMemory`.
        gathering: as there.
        whole: as there.
        activations: most that a micro-batch holds beyond all of these.
        step: most that the optimizer step holds beyond weights, master and optimizer; gradients are counted in.
        keeps_buffers: buffers (and gradients) are held between updates as well.
        host: names of the parts above that are kept in host memory.
    """

    weights: int
    trained: int
    small: int
    master: int
    optimizer: int
    gradients: int
    late: bool
    buffers: int
    reduction: int
    gathered: int
    gathering: int
    whole: int
    activations: int
    step: int
    keeps_buffers: bool
    host: frozenset[str] = frozenset()

    @property
    def on_host(self) -> int:
        """Bytes of the parts in host memory between updates."""
        return self.peak_on_host - (self.step if "step" in self.host else 0)

    @property
    def peak_on_host(self) -> int:
        """Most bytes of the parts in host memory."""
        return sum(getattr(self, part) for part in self.host)

    @property
    def away(self) -> int:
        """Bytes that leave the device with --offload_during_rollout; of a critic what is trained may go as well."""
        parts = {"optimizer"} if self.keeps_buffers else {"optimizer", "master"}
        return sum(getattr(self, part) for part in parts - self.host)

    @property
    def at_rest(self) -> int:
        """Bytes between updates, on device and host together."""
        states = self.weights + self.small + self.master + self.optimizer
        return states + self.keeps_buffers * (self.gradients + self.buffers)

    @property
    def update_peak(self) -> int:
        """Most bytes while it is trained, beyond what waits in host memory."""
        held = self.weights + self.small + self.master + self.optimizer
        backward = self.buffers + self.gathered + self.gathering + self.activations
        backward += 0 if self.late else self.gradients
        kept = self.gradients + self.buffers if self.keeps_buffers else 0
        step = max(kept, self.step + (self.buffers if self.keeps_buffers else 0))
        if "step" in self.host:
            step = kept
        return held + max(backward, self.buffers + self.reduction, step)


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
    host = held.host
    master = FLOAT32 * share if stage else 0
    gradients = FLOAT32 * (share if stage >= 2 else trainable)
    buffers, reduction, late = width * bucket_elements(trainable), 0, False
    if stage <= 1:
        activations = probe.backward_bytes if accumulates else max(0, probe.first_backward_bytes - gradients)
    else:
        activations = probe.bare_backward_bytes
    if stage == 0:
        # The reduction flattens the gradients when the activations are gone already.
        step, buffers = gradients + buffers, 0
    elif stage == 3:
        step = gradients + ADAM_BYTES * min(share, ZERO3_ELEMENTS)
    else:
        step = ADAM_BYTES * share
    if stage in (1, 2):
        reduction = buffers  # what is sent to the other ranks is a copy
    if stage == 2:
        late = bucket_elements(trainable) >= trainable and not accumulates
        reduction += 0 if late else gradients
        if bucket_elements(trainable) < trainable:  # it is full, and sent, when there still are activations
            buffers *= 2
    if strategy.adam_offload:
        host |= {"master", "optimizer", "step"}
        master += FLOAT32 * share  # gradients as the optimizer on the host reads them
        if stage < 3:  # new weights on their way back; in float32 also gradients of the micro-batches before the last
            master += width * share * (1 + (accumulates and not strategy.bf16))
    return EngineMemory(
        weights=held.weights,
        trained=width * (share if stage == 3 else trainable),
        small=held.small,
        master=master,
        optimizer=2 * FLOAT32 * share,
        gradients=gradients,
        late=late,
        buffers=buffers,
        reduction=reduction,
        gathered=held.gathered,
        gathering=held.gathering,
        whole=held.whole,
        activations=activations,
        step=step,
        keeps_buffers=stage == 3,
        host=host,
    )


def frozen_memory(probe: Probe, strategy: StrategyConfig, world: int) -> FrozenMemory:
    """Memory of the parameters of a model alone, trained or not."""
    if strategy.engine_stage < 3:
        return FrozenMemory(probe.weight_bytes)
    width = 2 if strategy.bf16 else FLOAT32
    # With one rank, and all of it on the device, there is nothing to bring together.
    whole = probe.weight_bytes if world > 1 or strategy.param_offload else 0
    small = min(whole, width * probe.small)
    return FrozenMemory(
        weights=-(-probe.weight_bytes // world),
        small=small,
        gathered=min(whole - small, ZERO3_ELEMENTS * width),
        gathering=min(whole - small, ZERO3_PREFETCH * width) if world > 1 else 0,
        whole=whole - small,
        host=frozenset({"weights"}) if strategy.param_offload else frozenset(),
    )


@dataclass
class MemoryPlan:
    """Memory of one rank.

    Attributes:
        engines: trained models by name.
        frozen: models that are never trained, by name.
        average: moving average of the actor.
        passes: most that a pass of a model without gradients holds, by name.
        decision: most that the actor holds to answer a batch of observations.
        offloads: what playing does not need waits in host memory (--offload_during_rollout).
        episodes: what the episodes of an iteration hold in host memory.
        demonstrations: what the demonstrations of a supervised loss hold in host memory.
    """

    engines: dict[str, EngineMemory]
    frozen: dict[str, FrozenMemory] = field(default_factory=dict)
    average: int = 0
    passes: dict[str, int] = field(default_factory=dict)
    decision: int = 0
    offloads: bool = False
    episodes: int = 0
    demonstrations: int = 0

    @property
    def _models(self) -> dict[str, EngineMemory | FrozenMemory]:
        return {**self.engines, **self.frozen}

    @property
    def _base(self) -> int:
        return sum(model.at_rest - model.on_host for model in self._models.values()) + self.average

    @property
    def away(self) -> int:
        """Bytes that wait in host memory while episodes are played; a reward model comes back to judge."""
        if not self.offloads:
            return 0
        critic = self.engines.get("critic")
        weights = critic.trained if critic is not None and not critic.keeps_buffers else 0
        return weights + sum(model.away for model in self._models.values())

    def _pass(self, name: str) -> int:
        """Most bytes on the device beyond `_base` while a model looks at rows."""
        model = self._models[name]
        return model.gathered + model.gathering + self.passes.get(name, 0)

    @property
    def at_playing(self) -> int:
        """Most bytes on the device while episodes are played, and judged by reward models; the actor stays whole."""
        judging = [0]
        for name in ("reward model", "rm_model"):
            if name in self.frozen:
                judging.append(self._pass(name) + (self.frozen[name].away if self.offloads else 0))
        actor = self.engines["actor"].whole if "actor" in self.engines else 0
        return self._base - self.away + actor + max(self.decision, *judging)

    @property
    def at_scoring(self) -> int:
        """Most bytes on the device while one model after the other looks at the episodes that were played.

        What ZeRO-3 has gathered for a pass of a trained model it keeps for a backward pass, which does not come.
        """
        kept, most = 0, 0
        for name, model in self._models.items():
            if name != "rm_model":
                most = max(most, kept + self._pass(name))
            if name in self.engines:
                kept += model.gathered
        return self._base + most

    @property
    def at_update(self) -> int:
        """Most bytes on the device while models are trained, one after the other."""
        return self._base + max((engine.update_peak - engine.at_rest for engine in self.engines.values()), default=0)

    @property
    def on_host(self) -> int:
        """Most bytes in host memory: episodes, demonstrations, and parts of models that were sent there."""
        return self.episodes + self.demonstrations + sum(model.peak_on_host for model in self._models.values())

    def in_one_place(self) -> MemoryPlan:
        """The same on a CPU, where the host is the device."""
        engines = {name: replace(model, host=frozenset()) for name, model in self.engines.items()}
        return replace(self, engines=engines, frozen={n: replace(m, host=frozenset()) for n, m in self.frozen.items()})

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
                "buffer of the gathering": e.gathering,
                "activations of a micro-batch": e.activations,
                "step": e.step,
            }
            titles = {"master": "float32 master copy", "optimizer": "optimizer states"}
            titles["step"] = "optimizer step, with its gradients"
            for part, size in parts.items():
                found.append((f"{name}: {titles.get(part, part)}{' (host)' if part in e.host else ''}", size))
        if "actor" in self.engines:
            found.append(("actor: whole while it plays", self.engines["actor"].whole))
        for name, model in self.frozen.items():
            found.append((f"{name}: weights{' (host)' if model.host else ''}", model.weights))
            found.append((f"{name}: small parameters, whole", model.small))
            found.append((f"{name}: gathered parameters", model.gathered))
            found.append((f"{name}: buffer of the gathering", model.gathering))
        found.append(("moving average of the actor", self.average))
        found.append(("answer to a batch of observations", self.decision))
        found += [(f"{name}: pass without gradients", size) for name, size in self.passes.items()]
        found.append(("away while episodes are played", self.away))
        found += [("episodes of an iteration (host)", self.episodes), ("demonstrations (host)", self.demonstrations)]
        return [(name, size) for name, size in found if size]

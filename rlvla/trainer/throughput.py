"""How much work is done per second, what share of the accelerator's peak that is, and how much memory it took.

Rates are work of all ranks over the time of the slowest one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rlvla.experience import Experience, Sample
from rlvla.models.inputs import VLAInputs
from rlvla.rollout.stats import RolloutStats
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.micro_batching import row_tokens
from rlvla.utils.hardware import device_bf16_peak, max_memory_allocated_gb, max_rss_gb
from rlvla.utils.strategy import DeepspeedStrategy, Engine


def training_flops(model: nn.Module, patches: int, tokens: int) -> float:
    """Floating-point operations of a forward and a backward pass over one decision.

    Two per weight and position forward, two for the gradient of the activations, and two for that of the weight where
    it is trained: the usual 6 N D with all weights (Kaplan et al. 2020). Towers and projector see the image patches,
    the rest the whole sequence. Left out: attention scores, norms, the embedding table, what is recomputed, and
    gradients of activations in a vision backbone of which nothing is trained.

    Args:
        model: the policy or a network like it, whole or sharded by ZeRO-3.
        patches: image patches of a decision, over its pictures.
        tokens: its whole sequence.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if "embed_tokens" not in name]
    vision_trained = any(p.requires_grad for name, p in parameters if "vision_backbone." in name)
    total = 0.0
    for name, parameter in parameters:
        of_pictures = "vision_backbone." in name or ".projector." in f".{name}"
        through = vision_trained or "vision_backbone." not in name
        per_weight = 2 + 2 * through + 2 * parameter.requires_grad
        total += per_weight * getattr(parameter, "ds_numel", parameter.numel()) * (patches if of_pictures else tokens)
    return total


class Throughput:
    """Measures `perf/*`.

    Args:
        strategy: tells the device and whether it computes in bfloat16.
        inputs: of the actor; they tell how many tokens a decision has.
    """

    def __init__(self, strategy: DeepspeedStrategy, inputs: VLAInputs):
        self._device, self._inputs = strategy.device, inputs
        self._peak = device_bf16_peak(strategy.device) if strategy.config.bf16 else None

    def measure_rollout(self, samples: Sequence[Sample], stats: RolloutStats, metrics: Metrics) -> None:
        """Of playing: every answer of the policy counts, those of attempts that failed too."""
        told = [text for sample in samples for text in sample.decision_instructions]
        length = self._length(told, samples[0].images.shape[1]) if told else 0
        self._count("rollout", stats.decisions, length, metrics)
        self._rates("rollout", stats.wall_s, metrics)

    def count_step(self, engines: Sequence[Engine], step: Experience, metrics: Metrics) -> None:
        """Rows of an optimizer step that trains these networks; stand-ins for no rows at all do not count."""
        rows, num_images = int(step.action_mask.any(1).sum()) if engines else 0, step.images.shape[1]
        length = self._length(step.instructions, num_images)
        self._count("update", rows, length, metrics)
        if self._peak is not None:
            patches = num_images * self._inputs.config.tower_configs()[0].num_patches
            flops = sum(training_flops(engine.module, patches, length) for engine in engines)
            metrics.total({"_update/flops": rows * flops})

    def measure_update(self, seconds: float, metrics: Metrics) -> None:
        """Of training on what `count_step` has counted, which took so long on this rank."""
        self._rates("update", seconds, metrics)
        if self._peak is not None:
            metrics.total({"_update/peak": self._peak})
            metrics.derived(
                "perf/update_mfu",
                lambda known: known["_update/flops"] / max(1e-9, known["_update/seconds"] * known["_update/peak"]),
            )

    def measure_memory(self, metrics: Metrics) -> None:
        """Largest memory of a rank since its start, without its environment workers."""
        metrics.maximum({"perf/max_rss_gb": max_rss_gb()})
        allocated = max_memory_allocated_gb(self._device)
        if allocated is not None:
            metrics.maximum({"perf/max_memory_allocated_gb": allocated})

    def _length(self, instructions: Sequence[str], num_images: int) -> int:
        """Tokens of one decision; 0 where there is none."""
        return max(row_tokens(self._inputs, instructions, num_images), default=0)

    @staticmethod
    def _count(phase: str, rows: int, length: int, metrics: Metrics) -> None:
        metrics.total({f"_{phase}/decisions": rows, f"_{phase}/tokens": rows * length})

    @staticmethod
    def _rates(phase: str, seconds: float, metrics: Metrics) -> None:
        metrics.maximum({f"_{phase}/seconds": seconds})
        for unit in ("decisions", "tokens"):
            work, time = f"_{phase}/{unit}", f"_{phase}/seconds"
            metrics.derived(
                f"perf/{phase}_{unit}_per_s", lambda known, work=work, time=time: known[work] / max(1e-9, known[time])
            )

"""How much of an iteration carries a learning signal, and how far the policy has moved from its start."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

_SAMPLED = 2**20  # entries of the initial weights that are kept, per rank


def signal_share(scores: Sequence[tuple[str, float]], *, groups: bool) -> tuple[float, int]:
    """The share of an iteration that a learner can learn from, and the number of groups or episodes it refers to.

    Args:
        scores: (uid of the group, score) of each episode.
        groups: whether the episodes of a group are compared: the share of the groups whose scores differ. Otherwise the
            share of the episodes whose score is not the most frequent one.
    """
    if not scores:
        return 0.0, 0
    if not groups:
        most_frequent = Counter(score for _, score in scores).most_common(1)[0][1]
        return 1 - most_frequent / len(scores), len(scores)
    members: dict[str, set[float]] = {}
    for uid, score in scores:
        members.setdefault(uid, set()).add(score)
    return sum(len(values) > 1 for values in members.values()) / len(members), len(members)


class StartDistance:
    """Distance of the trained weights from those at construction, relative to the norm of the latter.

    Of large models an evenly spaced sample of about a million weights stands for all, so that the memory and time this
    costs do not depend on the size of the model. Under ZeRO-3 each rank measures its own part.

    Args:
        module: the policy before training, or before a checkpoint is restored.
        strategy: sums over ranks.
    """

    def __init__(self, module: nn.Module, strategy: DeepspeedStrategy):
        self._module, self._strategy = module, strategy
        self._stride = max(1, math.ceil(sum(part.numel() for part in self._parts()) / _SAMPLED))
        self._start = self._sample()

    def _parts(self) -> list[Tensor]:
        trained = [p for p in self._module.parameters() if p.requires_grad]
        return [getattr(p, "ds_tensor", p).detach() for p in trained]  # this rank's part under ZeRO-3

    def _sample(self) -> list[Tensor]:
        return [part.flatten()[:: self._stride].float().cpu().clone() for part in self._parts()]

    def measure(self) -> float:
        """|weights - initial weights| / |initial weights|; called on every rank."""
        moved = sum(float((now - start).square().sum()) for now, start in zip(self._sample(), self._start))
        size = sum(float(start.square().sum()) for start in self._start)
        if any(hasattr(p, "ds_tensor") for p in self._module.parameters()):
            sums = self._strategy.all_reduce({"moved": moved, "size": size}, "sum")
            moved, size = sums["moved"], sums["size"]
        return math.sqrt(moved / size) if size else 0.0


def trainable_and_all(module: nn.Module) -> tuple[int, int]:
    """Numbers of trainable and of all parameters, also of a sharded module."""
    sizes = [(math.prod(getattr(p, "ds_shape", p.shape)), p.requires_grad) for p in module.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)

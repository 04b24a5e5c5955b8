"""Supervised loss on demonstrations in each optimizer step of the policy (PTX, Ouyang et al. 2022)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.algorithms.losses import aggregate_loss
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.rows import DemonstrationRows
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.replay import micro_batches
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.seeding import derive_rng

if TYPE_CHECKING:
    from rlvla.models.actor import Actor


class DemonstrationLoss:
    """The policy's supervised loss times a coefficient, on rows resampled for each optimizer step.

    The sampled rows depend only on the seed and the step, so a checkpoint need not store anything.

    Args:
        demos: the demonstrations.
        actor: the policy, which encodes the demonstrated actions.
        strategy: device, and reductions over ranks.
        coef: coefficient of the loss.
        rows: decisions per optimizer step, over all ranks.
        micro_rows: decisions per forward and backward pass on one rank.
        max_tokens: upper limit of their tokens, in place of `micro_rows` (--use_dynamic_batch); None: no limit.
    """

    def __init__(
        self,
        demos: Demonstrations,
        actor: Actor,
        strategy: DeepspeedStrategy,
        coef: float,
        rows: int,
        micro_rows: int,
        max_tokens: int | None = None,
    ):
        self._rows, self._strategy, self._coef = DemonstrationRows(demos, actor), strategy, coef
        self._demonstrated = np.flatnonzero(~self._rows.by_policy)
        self._size, self._micro_rows = min(rows, len(self._demonstrated)), micro_rows
        self._max_tokens = max_tokens

    def accumulate(self, engine: Engine, step: tuple[int, ...], metrics: Metrics) -> None:
        """Accumulate the gradient of the loss; called on all ranks before the policy's step.

        Args:
            engine: engine of the actor.
            step: iteration, epoch and number of the step, which seed the sampling of rows.
            metrics: receives `actor/ptx_loss` (nats per token, without the coefficient) and `actor/ptx_accuracy`.
        """
        strategy = self._strategy
        rng = derive_rng(strategy.seed, "ptx", *step)
        drawn = rng.permutation(self._demonstrated)[: self._size]
        batch = self._rows.take(drawn[strategy.rank :: strategy.world_size])
        batch = self._rows.with_noise(batch, rng, len(drawn), strategy.rank, strategy.world_size)
        tokens = max(1.0, strategy.all_reduce({"n": float(batch.action_mask.sum())}, "sum")["n"])
        engine.train()
        policy: Any = engine.module
        size = self._micro_rows
        if self._max_tokens is not None:
            longest = max(policy.row_tokens(batch.instructions, batch.images.shape[1]), default=1)
            size = int(strategy.all_reduce({"rows": max(1, self._max_tokens // longest)}, "min")["rows"])
        count = -(-self._size // (size * strategy.world_size))
        for micro in micro_batches(batch, size, count):
            micro = micro.to(strategy.device)
            output = engine(**policy.score(micro, 1.0), wants=("loss",))
            mask = micro.action_mask
            loss = aggregate_loss(output["loss"], mask, "token-mean", num_tokens=tokens, dp_size=strategy.world_size)
            engine.backward(self._coef * loss, last=False)
            names = {"actor/ptx_loss": "error", "actor/ptx_accuracy": "correct"}
            metrics.mean({name: output[key][mask].mean() for name, key in names.items()}, float(mask.sum()))

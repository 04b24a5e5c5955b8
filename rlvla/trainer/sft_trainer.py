"""Supervised fine-tuning: cross-entropy on the action tokens of demonstrations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from rlvla.algorithms.losses import aggregate_loss
from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.trainer.demonstrations import Demonstrations
from rlvla.trainer.guards import BadSteps
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.metrics_layout import SFT_LAYOUT
from rlvla.trainer.policy_export import PolicyRecord, export_policy
from rlvla.trainer.profiling import Stopwatch
from rlvla.trainer.replay import micro_batches, take
from rlvla.trainer.sft_config import SFTConfig
from rlvla.trainer.throughput import Throughput
from rlvla.utils.logging import progress_bar
from rlvla.utils.metrics_log import MetricsLogger
from rlvla.utils.seeding import derive_rng
from rlvla.utils.strategy import DeepspeedStrategy, OptimConfig


class DemonstrationRows:
    """Every step of every demonstration as a training row: what was seen, and the A actions that followed.

    Args:
        demos: the episodes.
        actor: encodes the actions.
    """

    def __init__(self, demos: Demonstrations, actor: Actor):
        chunk, dim = actor.inputs.config.action_chunk_len, actor.inputs.config.action_dim
        proprio = demos.proprio if actor.inputs.config.use_proprio else None
        tokens, masks = [], []
        for index, actions in enumerate(demos.actions):
            starts = np.arange(len(actions)) if demos.decision_steps is None else demos.decision_steps[index]
            steps = starts[:, None] + np.arange(chunk)  # [S, A]
            ahead = actions[np.minimum(steps, len(actions) - 1)]  # behind the end the last action repeats, masked
            tokens.append(actor.inputs.encode_actions(ahead))
            masks.append(np.repeat(steps < len(actions), dim, axis=1))
        self._rows = Experience(
            images=torch.from_numpy(demos.joined_images()),
            proprio=None if proprio is None else torch.from_numpy(np.concatenate(proprio)),
            instructions=[text for text, seen in zip(demos.instructions, demos.images) for _ in range(len(seen))],
            action_tokens=torch.from_numpy(np.concatenate(tokens)),
            action_mask=torch.from_numpy(np.concatenate(masks)),
        )

    def __len__(self) -> int:
        """Rows."""
        return len(self._rows)

    def take(self, rows: np.ndarray) -> Experience:
        """The rows [M] (int64) as a batch; for no rows one with an empty mask."""
        return take(self._rows, torch.from_numpy(rows))

    def batches(self, config: SFTConfig, strategy: DeepspeedStrategy) -> Iterator[Experience]:
        """This rank's share of every optimiser step of the run, shuffled anew in every epoch."""
        size = min(config.train_batch_size, len(self))
        for epoch in range(config.max_epochs):
            order = derive_rng(strategy.seed, "sft", epoch).permutation(len(self))
            for start in range(0, len(self) - size + 1, size):
                own = order[start + strategy.rank : start + size : strategy.world_size]
                yield self._rows.index(torch.from_numpy(own))


class SFTTrainer:
    """Trains an `Actor` on demonstrations.

    Args:
        actor: the policy.
        demos: the episodes.
        strategy: DeepSpeed.
        config: length and speed.
        save_path: run folder; `policy/` below it receives the result.
        record: what is noted in that folder.
    """

    def __init__(
        self,
        actor: Actor,
        demos: Demonstrations,
        strategy: DeepspeedStrategy,
        config: SFTConfig,
        save_path: Path,
        record: PolicyRecord,
    ):
        self._strategy, self._config, self._save_path, self._record = strategy, config, save_path, record
        self._rows = DemonstrationRows(demos, actor)
        self._total = config.optimizer_steps(len(self._rows))
        self._engine = strategy.prepare(
            actor,
            OptimConfig(
                config.learning_rate,
                tuple(config.adam_betas),
                config.l2,
                config.lr_scheduler,
                config.lr_warmup_ratio,
                self._total,
            ),
        )
        self._throughput = Throughput(strategy, actor.inputs)
        self._bad = BadSteps(save_path / "bad_batches", config.max_bad_steps, strategy, "step")
        self.logger = MetricsLogger(
            save_path if strategy.is_main else None,
            use_tensorboard=config.use_tensorboard,
            use_wandb=config.use_wandb,
            layout=SFT_LAYOUT,
        )

    def fit(self) -> dict[str, float]:
        """Run all optimiser steps, export the policy, return the metrics of the last steps.

        Raises:
            TrainingHalted: too many steps in a row had NaN or infinity; nothing is exported.
        """
        self._engine.train()
        means, watch, last = Metrics(), Stopwatch(), {}
        with progress_bar(self._total, "SFT", enabled=self._strategy.is_main, unit="step") as bar:
            for step, batch in enumerate(self._rows.batches(self._config, self._strategy), start=1):
                self._throughput.count_step([self._engine], batch, means)
                with watch.phase("update"):
                    self._train_step(step, batch, means)
                if step % self._config.logging_steps == 0 or step == self._total:
                    self._throughput.measure_update(watch.seconds["update"], means)
                    self._throughput.measure_memory(means)
                    last = {**means.reduce(self._strategy), "sft/lr": self._engine.learning_rate}
                    self.logger.log(last, step)
                    means, watch = Metrics(), Stopwatch()
                    bar.set_postfix_str(f"loss {last['sft/loss']:.3f} acc {last['sft/accuracy']:.2f}", refresh=False)
                bar.update(1)
        self.logger.close()
        export_policy(self._engine, self._save_path / "policy", self._strategy, self._record)
        return last

    def _train_step(self, step: int, batch: Experience, means: Metrics) -> None:
        strategy, config = self._strategy, self._config
        actor: Actor = self._engine.module
        tokens = strategy.all_reduce({"n": float(batch.action_mask.sum())}, "sum")["n"]
        count = int(strategy.all_reduce({"n": -(-len(batch) // config.micro_train_batch_size)}, "max")["n"])
        for index, micro in enumerate(micro_batches(batch, config.micro_train_batch_size, count)):
            micro = micro.to(strategy.device)
            output = self._engine(**actor.score(micro, 1.0), all_columns=True)
            chosen = output.gather(-1, micro.action_tokens.unsqueeze(-1)).squeeze(-1)
            nll = -(1 - config.label_smoothing) * chosen - config.label_smoothing * output.mean(-1)
            mask = micro.action_mask
            loss = aggregate_loss(nll, mask, "token-mean", num_tokens=tokens, dp_size=strategy.world_size)
            norm = self._engine.backward(loss, last=index == count - 1)
            right = (output.argmax(-1) == micro.action_tokens)[mask].float()
            values = {"sft/loss": -chosen[mask].mean(), "sft/accuracy": right.mean()}
            means.mean(values, float(mask.sum()))
        means.mean({"sft/grad_norm": norm}, float(math.isfinite(norm)))
        if not self._bad.look("actor", norm, batch, step, {"temperature": 1.0}):
            means.total({"sft/skipped_steps": 1.0 / strategy.world_size})

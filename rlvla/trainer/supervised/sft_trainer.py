"""Supervised fine-tuning: cross-entropy on the action tokens of demonstrations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from rlvla.algorithms.losses import aggregate_loss
from rlvla.checkpoints.policy_folder import PolicyRecord, export_policy
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.rows import DemonstrationRows
from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.models.policy import Policy
from rlvla.trainer.guards import BadSteps
from rlvla.trainer.measurements import Stopwatch, Throughput
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.metrics_writer import SFT_LAYOUT, MetricsLogger
from rlvla.trainer.observers import OptimizerStep
from rlvla.trainer.replay import micro_batches
from rlvla.trainer.supervised.config import SFTConfig
from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.terminal import progress_bar


class SFTTrainer:
    """Trains a policy on demonstrations.

    Args:
        actor: the policy.
        demos: the demonstrations.
        strategy: process group and DeepSpeed engines.
        config: training hyperparameters.
        save_path: run folder; the result goes to its subfolder `policy/`.
        record: environment record written into the exported folder.
        fallback_path: parent of the exported folder if it cannot be written to `save_path`.

    Attributes:
        exported: the exported folder, after `fit`.
    """

    def __init__(
        self,
        actor: Actor,
        demos: Demonstrations,
        strategy: DeepspeedStrategy,
        config: SFTConfig,
        save_path: Path,
        record: PolicyRecord,
        fallback_path: str | None = None,
    ):
        self._strategy, self._config, self._save_path, self._record = strategy, config, save_path, record
        self._fallback_path, self.exported = fallback_path, save_path / "policy"
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
        self._throughput = Throughput(strategy, actor)
        self._bad = BadSteps(save_path / "bad_batches", config.max_bad_steps, strategy, "step")
        self.logger = MetricsLogger(
            save_path if strategy.is_main else None,
            use_tensorboard=config.use_tensorboard,
            use_wandb=config.use_wandb,
            wandb_run=config.wandb_run,
            layout=SFT_LAYOUT,
        )

    def fit(self) -> dict[str, float]:
        """Run all optimizer steps, export the policy, and return the metrics of the last steps.

        Raises:
            TrainingHalted: too many consecutive steps were not finite; nothing is exported.
        """
        self._engine.train()
        means, watch, last = Metrics(), Stopwatch(), {}
        with progress_bar(self._total, "SFT", enabled=self._strategy.is_main, unit="step") as bar:
            for step, batch in enumerate(self._batches(), start=1):
                with watch.phase("update"):
                    norm = self._train_step(step, batch, means)
                self._throughput.after_step(OptimizerStep("actor", self._engine, norm, batch, step - 1, means))
                if step % self._config.logging_steps == 0 or step == self._total:
                    self._throughput.after_steps(watch.seconds["update"], means)
                    self._throughput.measure_memory(means)
                    last = {**means.reduce(self._strategy), "sft/lr": self._engine.learning_rate}
                    self.logger.log(last, step)
                    means, watch = Metrics(), Stopwatch()
                    bar.set_postfix_str(f"loss {last['sft/loss']:.3f} acc {last['sft/accuracy']:.2f}", refresh=False)
                bar.update(1)
        self.logger.close()
        result = self._save_path / "policy"
        self.exported = export_policy(self._engine, result, self._strategy, self._record, self._fallback_path)
        return last

    def _batches(self) -> Iterator[Experience]:
        config, strategy = self._config, self._strategy
        sizes = (config.train_batch_size, config.max_epochs)
        return self._rows.batches(*sizes, strategy.seed, strategy.rank, strategy.world_size)

    def _train_step(self, step: int, batch: Experience, means: Metrics) -> float:
        """One optimizer step; returns the gradient norm."""
        strategy, config = self._strategy, self._config
        policy: Policy = self._engine.module
        tokens = strategy.all_reduce({"n": float(batch.action_mask.sum())}, "sum")["n"]
        count = int(strategy.all_reduce({"n": -(-len(batch) // config.micro_train_batch_size)}, "max")["n"])
        for index, micro in enumerate(micro_batches(batch, config.micro_train_batch_size, count)):
            micro = micro.to(strategy.device)
            inputs = policy.score(micro, 1.0)
            output = self._engine(**inputs, wants=("loss",), **config.supervision)
            mask = micro.action_mask
            loss = aggregate_loss(output["loss"], mask, "token-mean", num_tokens=tokens, dp_size=strategy.world_size)
            norm = self._engine.backward(loss, last=index == count - 1)
            values = {"sft/loss": output["error"][mask].mean(), "sft/accuracy": output["correct"][mask].mean()}
            means.mean(values, float(mask.sum()))
        means.mean({"sft/grad_norm": norm}, float(math.isfinite(norm)))
        if not self._bad.check("actor", norm, batch, step, {"temperature": 1.0}):
            means.total({"sft/skipped_steps": 1.0 / strategy.world_size})
        return norm

"""Base class of the trainers of models of single frames: reward model and return model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlvla.checkpoints.policy_folder import PolicyRecord, export_policy
from rlvla.experience import Experience
from rlvla.trainer.guards import BadSteps
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.metrics_writer import Layout, MetricsLogger
from rlvla.trainer.supervised.checkpoints import SupervisedCheckpoints
from rlvla.trainer.supervised.config import FrameModelConfig
from rlvla.utils.bars import progress_bar
from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.seeding import derive_rng


class FrameTrainer(ABC):
    """Optimizer steps on shuffled training items, metrics on held-out episodes, and the exported folder.

    Args:
        model: the model to train.
        strategy: process group and DeepSpeed engines.
        config: training hyperparameters.
        save_path: run folder; the result goes to its subfolder `name`.
        record: written into the exported folder.
        fallback_path: parent of the exported folder if it cannot be written to `save_path`.
        items: number of training items (frames, or pairs of episodes).
        drawn: items of an epoch.
        batch: items per optimizer step, over all ranks.

    Attributes:
        name: of the model: prefix of the metrics, and name of the exported folder.
        outcome: metric that summarizes a run.
        selects_by: metric whose largest value selects the epoch after which the model is exported; None: the last one.
        model: the model in training.
        exported: the exported folder, after `fit`.
    """

    name: ClassVar[str]
    outcome: ClassVar[str]
    selects_by: ClassVar[str | None] = None

    def __init__(
        self,
        model: nn.Module,
        strategy: DeepspeedStrategy,
        config: FrameModelConfig,
        save_path: Path,
        record: PolicyRecord,
        fallback_path: str | None,
        *,
        items: int,
        drawn: int,
        batch: int,
    ):
        self._strategy, self._save_path, self._record, self.model = strategy, save_path, record, model
        self._fallback_path, self.exported = fallback_path, save_path / self.name
        self._items, self._drawn, self._batch = items, drawn, min(batch, drawn)
        self._logging_steps = config.logging_steps
        self._total = config.max_epochs * (drawn // self._batch)
        optim = OptimConfig(
            config.learning_rate, (0.9, 0.95), config.l2, config.lr_scheduler, config.lr_warmup_ratio, self._total
        )
        self._engine = strategy.prepare(model, optim)
        self._bad = BadSteps(save_path / "bad_batches", config.max_bad_steps, strategy, "step")
        self.logger = MetricsLogger(
            save_path if strategy.is_main else None,
            use_tensorboard=config.use_tensorboard,
            use_wandb=config.use_wandb,
            wandb_run=config.wandb_run,
            layout=self._layout,
        )
        data = {"items": items, "optimizer_steps": self._total}
        self._checkpoints = SupervisedCheckpoints(save_path, config, {self.name: self._engine}, strategy, data)
        self._step, self._best = 0, dict[str, float]()  # optimizer steps taken, metrics of the exported model

    @property
    def _layout(self) -> Layout:
        charts = {"loss": "loss", "gradient norm": "grad_norm", "learning rate": "lr"}
        return {self.name.replace("_", " "): {title: [f"{self.name}/{key}"] for title, key in charts.items()}}

    @abstractmethod
    def _loss(self, items: Tensor) -> tuple[Tensor, Experience, dict[str, Tensor]]:
        """The loss on these items of this rank, averaged over the optimizer step, with the frames and their labels."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Metrics on the held-out episodes."""

    def resume(self) -> None:
        """Restore the newest checkpoint of the run, if there is one. Called before anything is logged.

        Raises:
            ConfigError: the checkpoint was written with other flags or data, or cannot be used.
        """
        loaded = self._checkpoints.load(self.logger)
        if loaded is None:
            return
        self._step, state, _ = loaded
        self._best, self.exported = state["best"], Path(state["exported"])

    def fit(self) -> dict[str, float]:
        """Train, export the model of the last or the best epoch, and return its metrics on the held-out episodes.

        Raises:
            TrainingHalted: too many consecutive steps were not finite; nothing is exported.
        """
        size, means, name = self._batch, Metrics(), self.name
        label, per_epoch = name.replace("_", " "), self._drawn // self._batch
        with progress_bar(self._total, label, enabled=self._strategy.is_main) as bar:
            bar.update(self._step)
            while self._step < self._total:
                epoch, first = divmod(self._step, per_epoch)
                order = derive_rng(self._strategy.seed, label, epoch).permutation(self._items)[: self._drawn]
                for start in range(first * size, per_epoch * size, size):
                    self._step += 1
                    self._train_step(self._step, torch.from_numpy(order[start : start + size]), means)
                    if self._step % self._logging_steps == 0 or self._step == self._total:
                        values = means.reduce(self._strategy)
                        self.logger.log(values | {f"{name}/lr": self._engine.learning_rate}, self._step)
                        bar.set_postfix_str(f"loss {values[f'{name}/loss']:.3f}", refresh=False)
                        means = Metrics()
                    bar.update(1)
                    if self._step % per_epoch == 0:
                        self._select()
                    if self._step < self._total and self._checkpoints.due(self._step):
                        self._checkpoints.save(self._step, {"best": self._best, "exported": str(self.exported)})
        self.logger.close()
        return self._best

    def _select(self) -> None:
        """Evaluate after an epoch, if `selects_by` is set or it is the last one, and export the best model."""
        if self.selects_by is None and self._step < self._total:
            return
        metrics = self.evaluate()
        self.logger.log(metrics, self._step)
        if not self._best or self.selects_by is None or metrics[self.selects_by] > self._best[self.selects_by]:
            self._best = metrics
            result, record = self._save_path / self.name, self._record_best()
            self.exported = export_policy(self._engine, result, self._strategy, record, self._fallback_path)

    def _record_best(self) -> PolicyRecord:
        """The record of the best model so far, which has just been evaluated and is to be exported."""
        return self._record

    def _train_step(self, step: int, items: Tensor, means: Metrics) -> None:
        """One optimizer step on the given items, which are split over the ranks."""
        self._engine.train()
        loss, inputs, labels = self._loss(items[self._strategy.rank :: self._strategy.world_size])
        norm = self._engine.backward(loss, last=True)
        assert norm is not None
        means.mean({f"{self.name}/loss": loss}, 1.0)
        means.mean({f"{self.name}/grad_norm": norm}, float(math.isfinite(norm)))
        if not self._bad.check(self.name, norm, inputs, step, labels):
            means.total({f"{self.name}/skipped_steps": 1.0 / self._strategy.world_size})

    def _logits(self, inputs: Experience) -> Tensor:
        """Outputs of the model for frames."""
        model: Any = self._engine.module
        return self._engine(**model.score(inputs.to(self._strategy.device)))

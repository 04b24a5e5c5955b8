"""Training a `RewardModel`: does an episode succeed, and how far has it come, judged by single frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from rlvla.experience import Experience
from rlvla.models.value_models import RewardModel
from rlvla.trainer.demonstrations import UNKNOWN_STATE, Demonstrations
from rlvla.trainer.guards import BadSteps
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.metrics_layout import REWARD_MODEL_LAYOUT
from rlvla.trainer.policy_export import PolicyRecord, export_policy
from rlvla.trainer.reward_model_config import RewardModelConfig
from rlvla.utils.logging import progress_bar
from rlvla.utils.metrics_log import MetricsLogger
from rlvla.utils.seeding import derive_rng
from rlvla.utils.statistics import auroc, calibration_error, spearman
from rlvla.utils.strategy import DeepspeedStrategy, OptimConfig

_EARLY = 0.5  # frames of a success before this share of it show that it has not happened yet


@dataclass
class FrameRows:
    """Frames as training rows.

    Attributes:
        inputs: images, proprio, instructions.
        success: [M] 1 or 0; NaN where it cannot be told from the frame (the later part of a success).
        progress: [M] share of the episode's time.
        failed: [M] bool, frames of failures, whose progress is only capped.
    """

    inputs: Experience
    success: torch.Tensor
    progress: torch.Tensor
    failed: torch.Tensor

    @classmethod
    def of(cls, demos: Demonstrations, episodes: Sequence[int], use_proprio: bool) -> FrameRows:
        """All frames of these episodes."""
        success, progress, failed = [], [], []
        for index in episodes:
            steps = len(demos.images[index])
            time = np.linspace(0.0, 1.0, steps) if steps > 1 else np.ones(1)
            if demos.success[index]:
                label = np.where(time < _EARLY, 0.0, np.nan)
                label[-1] = 1.0
            else:
                label = np.zeros(steps)
            success.append(label)
            progress.append(time)
            failed.append(np.full(steps, not demos.success[index]))
        proprio = demos.proprio if use_proprio else None
        inputs = Experience(
            images=torch.from_numpy(np.concatenate([demos.images[i] for i in episodes])),
            proprio=None if proprio is None else torch.from_numpy(np.concatenate([proprio[i] for i in episodes])),
            instructions=[demos.instructions[i] for i in episodes for _ in range(len(demos.images[i]))],
        )
        columns = [torch.from_numpy(np.concatenate(part)) for part in (success, progress, failed)]
        return cls(inputs, columns[0].float(), columns[1].float(), columns[2])


def label_weights(success: torch.Tensor, balance: float) -> torch.Tensor:
    """What each frame [M] counts in the cross-entropy: positive ones `balance`, negative ones 1, unknown ones 0."""
    return torch.where(success == 1, balance, 1.0) * ~success.isnan()


def reward_model_loss(
    logits: torch.Tensor,
    success: torch.Tensor,
    progress: torch.Tensor,
    failed: torch.Tensor,
    config: RewardModelConfig,
    balance: float,
    *,
    total_weight: float | None = None,
    num_frames: float | None = None,
    dp_size: int = 1,
) -> torch.Tensor:
    """Binary cross-entropy for success plus a squared error for progress, both means over the optimizer step.

    Args:
        logits: [M, T], success at column 0, progress at column 1.
        success: [M], see `FrameRows`.
        progress: [M].
        failed: [M] bool.
        config: weights.
        balance: weight of a positive frame (there are few: one for each success).
        total_weight: sum of `label_weights` of the step over all ranks; by default of these frames.
        num_frames: of the step over all ranks; by default these.
        dp_size: number of ranks, whose gradients are averaged: the mean of their losses is that of the step.
    """
    weight = label_weights(success, balance)
    bce = functional.binary_cross_entropy_with_logits(logits[:, 0], success.nan_to_num(), reduction="none")
    predicted = torch.sigmoid(logits[:, 1])
    over = (predicted - config.failure_progress_cap).clamp(min=0.0)
    error = torch.where(failed, over, predicted - progress).square()
    total_weight = float(weight.sum()) if total_weight is None else total_weight
    num_frames = len(error) if num_frames is None else num_frames
    of_success, of_progress = (bce * weight).sum() / max(total_weight, 1e-8), error.sum() / max(num_frames, 1)
    return dp_size * (of_success + config.progress_coef * of_progress)


def split_episodes(demos: Demonstrations, share: float, seed: int) -> tuple[list[int], list[int]]:
    """(training, held-out) episodes; those of one initial state stay together, unknown states count as different."""
    everything = range(len(demos.actions))
    known = demos.init_states or [UNKNOWN_STATE] * len(everything)
    start = [(task, state, i if (task, state) == UNKNOWN_STATE else 0) for i, (task, state) in enumerate(known)]
    states = sorted(set(start))
    order = derive_rng(seed, "reward model split").permutation(len(states))
    kept = {states[i] for i in order[: max(1, round(share * len(states)))]}
    return [i for i in everything if start[i] not in kept], [i for i in everything if start[i] in kept]


class RewardModelTrainer:
    """Trains a reward model on episodes with their outcomes.

    Args:
        model: to be trained.
        demos: successes and failures.
        strategy: DeepSpeed.
        config: length, speed, weights.
        save_path: run folder; `reward_model/` below it receives the result.
        record: what is noted in that folder.
    """

    def __init__(
        self,
        model: RewardModel,
        demos: Demonstrations,
        strategy: DeepspeedStrategy,
        config: RewardModelConfig,
        save_path: Path,
        record: PolicyRecord,
    ):
        self._strategy, self._config, self._save_path, self._record = strategy, config, save_path, record
        self._demos, self._proprio = demos, bool(model.inputs.config.use_proprio)
        train, self._heldout = split_episodes(demos, config.heldout_share, strategy.seed)
        self._rows = FrameRows.of(demos, train, self._proprio)
        positives = float((self._rows.success == 1).sum())
        self._balance = max(1.0, float((self._rows.success == 0).sum()) / max(1.0, positives))
        self._batch = min(config.train_batch_size, len(self._rows.inputs))
        self._total = config.max_epochs * (len(self._rows.inputs) // self._batch)
        optim = OptimConfig(
            config.learning_rate, (0.9, 0.95), config.l2, config.lr_scheduler, config.lr_warmup_ratio, self._total
        )
        self._engine = strategy.prepare(model, optim)
        self._bad = BadSteps(save_path / "bad_batches", config.max_bad_steps, strategy, "step")
        self.logger = MetricsLogger(
            save_path if strategy.is_main else None,
            use_tensorboard=config.use_tensorboard,
            use_wandb=config.use_wandb,
            layout=REWARD_MODEL_LAYOUT,
        )

    def fit(self) -> dict[str, float]:
        """Train, export, and return the metrics on the held-out episodes.

        Raises:
            TrainingHalted: too many steps in a row had NaN or infinity; nothing is exported.
        """
        step, size, means = 0, self._batch, Metrics()
        with progress_bar(self._total, "reward model", enabled=self._strategy.is_main, unit="step") as bar:
            for epoch in range(self._config.max_epochs):
                order = derive_rng(self._strategy.seed, "reward model", epoch).permutation(len(self._rows.inputs))
                for start in range(0, len(order) - size + 1, size):
                    step += 1
                    self._step(step, torch.from_numpy(order[start : start + size]), means)
                    if step % self._config.logging_steps == 0 or step == self._total:
                        values = means.reduce(self._strategy)
                        self.logger.log(values | {"reward_model/lr": self._engine.learning_rate}, step)
                        bar.set_postfix_str(f"loss {values['reward_model/loss']:.3f}", refresh=False)
                        means = Metrics()
                    bar.update(1)
        metrics = self.evaluate()
        self.logger.log(metrics, step)
        self.logger.close()
        export_policy(self._engine, self._save_path / "reward_model", self._strategy, self._record)
        return metrics

    def _step(self, step: int, rows: torch.Tensor, means: Metrics) -> None:
        """Train on these rows of all ranks."""
        self._engine.train()
        rows = rows[self._strategy.rank :: self._strategy.world_size]
        model: RewardModel = self._engine.module
        device, data = self._strategy.device, self._rows
        inputs = data.inputs.index(rows)
        labels = {"success": data.success[rows], "progress": data.progress[rows], "failed": data.failed[rows]}
        logits = self._engine(**model.score(inputs.to(device)))
        on_device = {name: label.to(device) for name, label in labels.items()}
        own = {"total_weight": float(label_weights(labels["success"], self._balance).sum()), "num_frames": len(rows)}
        totals = self._strategy.all_reduce(own, "sum") | {"dp_size": self._strategy.world_size}
        loss = reward_model_loss(logits, **on_device, config=self._config, balance=self._balance, **totals)
        norm = self._engine.backward(loss, last=True)
        means.mean({"reward_model/loss": loss}, 1.0)
        means.mean({"reward_model/grad_norm": norm}, float(math.isfinite(norm)))
        if not self._bad.look("reward_model", norm, inputs, step, labels):
            means.total({"reward_model/skipped_steps": 1.0 / self._strategy.world_size})

    def evaluate(self) -> dict[str, float]:
        """On the held-out episodes: AUROC and calibration of the last frame, Spearman of progress with time."""
        self._engine.train(False)
        model: RewardModel = self._engine.module
        probabilities, outcomes, correlations = [], [], []
        for index in self._heldout:
            rows = FrameRows.of(self._demos, [index], self._proprio).inputs.to(self._strategy.device)
            with torch.no_grad():
                logits = torch.sigmoid(self._engine(**model.score(rows))).cpu()
            probabilities.append(float(logits[-1, 0]))
            outcomes.append(self._demos.success[index])
            if outcomes[-1] and len(rows) > 2:
                correlations.append(spearman(logits[:, 1].tolist(), range(len(rows))))
        finite = [c for c in correlations if np.isfinite(c)]
        return {
            "reward_model/auroc": auroc(probabilities, outcomes),
            "reward_model/ece": calibration_error(probabilities, outcomes),
            "reward_model/progress_spearman": float(np.mean(finite)) if finite else float("nan"),
            "reward_model/heldout_episodes": float(len(outcomes)),
            "reward_model/heldout_successes": float(sum(outcomes)),
        }

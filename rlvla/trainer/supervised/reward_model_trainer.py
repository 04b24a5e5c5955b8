"""Training of a `RewardModel`, which predicts success and progress of an episode from single frames."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from rlvla.checkpoints.policy_folder import PolicyRecord
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reward_model_rows import EpisodeFrames, FrameRows, ranked_pairs, split_episodes
from rlvla.evaluation.statistics import auroc, calibration_error, spearman
from rlvla.experience import Experience
from rlvla.models.value_models import RewardModel
from rlvla.trainer.supervised.config import RewardModelConfig
from rlvla.trainer.supervised.frame_trainer import FrameTrainer
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

CENTERING = 1e-3
PAIRS_PER_EPISODE = 8  # pairs in an epoch, per training episode; their total number grows quadratically


def label_weights(success: torch.Tensor, balance: float) -> torch.Tensor:
    """Weight of each frame [M] in the cross-entropy: `balance` for positive, 1 for negative, 0 for unknown labels."""
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
    """Binary cross-entropy for success plus squared error for progress, both averaged over the optimizer step.

    Args:
        logits: [M, T], with success in column 0 and progress in column 1.
        success: [M], see `FrameRows`.
        progress: [M], see `FrameRows`.
        failed: [M] bool, see `FrameRows`.
        config: `progress_coef` and `failure_progress_cap`.
        balance: weight of a positive frame (there is one per successful episode).
        total_weight: sum of `label_weights` over all ranks of the step; default: of the given frames.
        num_frames: number of frames over all ranks of the step; default: of the given frames.
        dp_size: number of ranks, over which gradients are averaged.
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


def bradley_terry_loss(
    better: torch.Tensor, worse: torch.Tensor, *, num_pairs: float | None = None, dp_size: int = 1
) -> torch.Tensor:
    """-log P(better beats worse), the probability being sigmoid(better - worse), averaged over the optimizer step.

    Bradley and Terry 1952. Only differences count, so a small penalty on the sum of the two scores keeps them near 0,
    the middle of the sigmoid by which the model reports them.

    Args:
        better: [P], scores of the better episodes.
        worse: [P], scores of the others.
        num_pairs: number of pairs over all ranks of the step; default: P.
        dp_size: number of ranks, over which gradients are averaged.
    """
    num_pairs = len(better) if num_pairs is None else num_pairs
    losses = functional.softplus(worse - better) + CENTERING * (better + worse).square()
    return dp_size * losses.sum() / max(num_pairs, 1)


def episode_scores(logits: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """[count]: mean of the success logits [M, T] (column 0) over the frames of each episode.

    Args:
        logits: outputs of the model.
        positions: [M], the episode of each frame.
        count: number of episodes.
    """
    sums = logits.new_zeros(count).index_add(0, positions, logits[:, 0])
    return sums / torch.bincount(positions, minlength=count).clamp(min=1)


class RewardModelTrainer(FrameTrainer):
    """Trains a reward model on episodes with known outcomes.

    Args:
        model: the model to train.
        demos: successful and failed episodes.
        strategy: process group and DeepSpeed engines.
        config: training hyperparameters.
        save_path: run folder; the result goes to its subfolder `reward_model/`.
        record: environment record written into the exported folder.
        fallback_path: parent of the exported folder if it cannot be written to `save_path`.
    """

    name, outcome = "reward_model", "reward_model/auroc"
    model: RewardModel

    def __init__(
        self,
        model: RewardModel,
        demos: Demonstrations,
        strategy: DeepspeedStrategy,
        config: RewardModelConfig,
        save_path: Path,
        record: PolicyRecord,
        fallback_path: str | None = None,
    ):
        self._config, self._demos = config, demos
        train, self._heldout = split_episodes(demos, config.heldout_share, strategy.seed)
        self._pairs: list[tuple[int, int]] = []
        self._frames: EpisodeFrames | None = None
        if config.pairs is None:
            self._rows = FrameRows.of(demos, train, model)
            items = drawn = len(self._rows.inputs)
            batch = config.train_batch_size
        else:
            self._pairs = ranked_pairs(demos, train, config.pairs)
            self._frames = EpisodeFrames(demos, train, config.pair_frames, model)
            self._rows = self._frames.rows
            items, batch = len(self._pairs), config.pairs_per_step
            drawn = min(items, PAIRS_PER_EPISODE * len(train))
        positives = float((self._rows.success == 1).sum())
        self._balance = max(1.0, float((self._rows.success == 0).sum()) / max(1.0, positives))
        super().__init__(
            model, strategy, config, save_path, record, fallback_path, items=items, drawn=drawn, batch=batch
        )

    def _loss(self, items: torch.Tensor) -> tuple[torch.Tensor, Experience, dict[str, torch.Tensor]]:
        rows, positions, num_pairs = items, torch.empty(0, dtype=torch.long), len(items)
        if self._frames is not None:
            rows, positions = self._frames.of([index for pair in rows.tolist() for index in self._pairs[pair]])
        device, data, world = self._strategy.device, self._rows, self._strategy.world_size
        inputs = data.inputs.index(rows)
        labels = {"success": data.success[rows], "progress": data.progress[rows], "failed": data.failed[rows]}
        logits = self._logits(inputs)
        weight = float(label_weights(labels["success"], self._balance).sum())
        counts = {"weight": weight, "frames": len(rows), "pairs": float(num_pairs)}
        totals = self._strategy.all_reduce(counts, "sum")
        success = labels["success"].to(device)
        loss = reward_model_loss(
            logits,
            success if self._frames is None else torch.full_like(success, math.nan),  # of pairs: progress alone
            labels["progress"].to(device),
            labels["failed"].to(device),
            self._config,
            self._balance,
            total_weight=totals["weight"],
            num_frames=totals["frames"],
            dp_size=world,
        )
        if self._frames is not None:
            scores = episode_scores(logits, positions.to(device), 2 * num_pairs)
            loss = bradley_terry_loss(scores[0::2], scores[1::2], num_pairs=totals["pairs"], dp_size=world) + loss
        return loss, inputs, labels

    def evaluate(self) -> dict[str, float]:
        """AUROC and calibration error at the last frame, and Spearman correlation of progress with time, held out."""
        self._engine.train(False)
        probabilities, outcomes, correlations = [], [], []
        for index in self._heldout:
            rows = FrameRows.of(self._demos, [index], self.model).inputs
            with torch.no_grad():
                logits = torch.sigmoid(self._logits(rows)).cpu()
            probabilities.append(float(logits[-1, 0]))
            outcomes.append(self._demos.success[index])
            if outcomes[-1] and len(rows) > 2:
                correlations.append(spearman(logits[:, 1].tolist(), range(len(rows))))
        finite = [c for c in correlations if np.isfinite(c)]
        return self._pair_metrics() | {
            "reward_model/auroc": auroc(probabilities, outcomes),
            "reward_model/ece": calibration_error(probabilities, outcomes),
            "reward_model/progress_spearman": float(np.mean(finite)) if finite else float("nan"),
            "reward_model/heldout_episodes": float(len(outcomes)),
            "reward_model/heldout_successes": float(sum(outcomes)),
        }

    def _pair_metrics(self) -> dict[str, float]:
        """With --pairs: fraction of held-out pairs whose better episode has the higher score; ties count half."""
        if self._config.pairs is None:
            return {}
        pairs = ranked_pairs(self._demos, self._heldout, self._config.pairs)
        if not pairs:
            return {"reward_model/heldout_pairs": 0.0}
        scores = {}
        for index in self._heldout:
            frames = EpisodeFrames(self._demos, [index], self._config.pair_frames, self.model)
            with torch.no_grad():
                logits = self._logits(frames.rows.inputs).cpu()
            scores[index] = float(logits[:, 0].mean())
        correct = sum(float(scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j]) for i, j in pairs)
        return {"reward_model/pair_accuracy": correct / len(pairs), "reward_model/heldout_pairs": float(len(pairs))}

"""The learned reward model as a reward source: progress from decision to decision, on the training device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlvla.experience import Experience, Sample
from rlvla.models.value_models import REWARD_HEAD_FILE, RewardModel
from rlvla.rewards import register_reward
from rlvla.trainer.setup import check_checkpoint
from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlvla.rewards import RewardConfig


@register_reward("rm_model")
class RewardModelSource:
    """Pays the change of the model's progress over each decision, at its last executed step.

    Attributes:
        device: where the model runs; the trainer sets it to the training device.
        waits_on_host: the model is there only while it judges. It is never shared out: ranks ask it at their own pace.
    """

    def __init__(self, config: RewardConfig):
        if config.rm_model_path is None:
            raise ConfigError("--reward rm_model needs --rm_model_path")
        self._folder, self._batch = Path(config.rm_model_path), config.rm_model_batch_size
        try:
            check_checkpoint(self._folder, None)
        except ConfigError as error:
            raise ConfigError([f"--rm_model_path: {problem}" for problem in error.problems]) from None
        if not (self._folder / REWARD_HEAD_FILE).is_file():
            raise ConfigError(
                f"--rm_model_path: {self._folder} is not a reward model, {REWARD_HEAD_FILE} is missing there; train "
                "one with cli/train_rm_vla.py"
            )
        self.device: torch.device | str = "cpu"
        self.waits_on_host = False
        self._model: RewardModel | None = None
        self._waiting: list[Sample] = []

    def submit(self, sample: Sample) -> None:
        """Keep the episode until `collect`."""
        self._waiting.append(sample)

    def collect(self) -> list[float | np.ndarray]:
        """Judge all frames of all episodes in batches."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return []
        progress = self._progress(waiting)
        if self.waits_on_host and self._model is not None:
            self._model.to("cpu")
        return [_changes(sample, own) for sample, own in zip(waiting, progress)]

    def _progress(self, samples: list[Sample]) -> list[np.ndarray]:
        """[S + 1] of each episode."""
        if self._model is None:
            self._model = RewardModel.from_pretrained(self._folder).eval()
        self._model.to(self.device)
        counts = [sample.num_decisions + 1 for sample in samples]
        images = torch.cat([torch.cat([sample.images, sample.last_images[None]]) for sample in samples])
        proprio = None
        if samples[0].proprio is not None:
            proprio = torch.cat([torch.cat([sample.proprio, sample.last_proprio[None]]) for sample in samples])
        words = [sample.instruction for sample, count in zip(samples, counts) for _ in range(count)]
        parts = []
        for start in range(0, len(images), self._batch):
            rows = slice(start, start + self._batch)
            own = None if proprio is None else proprio[rows]
            batch = Experience(images=images[rows], proprio=own, instructions=words[rows])
            parts.append(self._model.progress(batch.to(self.device)).cpu())
        return [part.numpy() for part in torch.cat(parts).split(counts)]


def _changes(sample: Sample, progress: np.ndarray) -> np.ndarray:
    """[T]: what each decision gained, at its last executed step."""
    dim = sample.action_mask.shape[1] // sample.rewards.shape[1]
    executed = sample.action_mask[:, ::dim].sum(1).numpy() if dim else np.ones(len(progress) - 1, dtype=int)
    rewards = np.zeros(int(executed.sum()))
    rewards[executed.cumsum() - 1] = np.diff(progress)
    return rewards

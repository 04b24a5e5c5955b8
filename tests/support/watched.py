"""Whether episodes were decided by the weights that they name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from rlvla.experience import Experience, Sample
from rlvla.trainer.ppo_trainer import PPOTrainer


class Watched:
    """What a run played and with which weights it was trained.

    Attributes:
        iterations: iteration -> the episodes it was trained on.
        weights: version -> the policy before that iteration.
    """

    def __init__(self) -> None:
        self.iterations: dict[int, list[Sample]] = {}
        self.weights: dict[int, Any] = {}

    def deviation(self, sample: Sample) -> float:
        """Largest difference between the log-probs of an episode and those of the weights of its versions."""
        assert sample.versions is not None
        largest = 0.0
        for row, version in enumerate(sample.versions.tolist()):
            policy = self.weights[version]
            one = Experience(
                images=sample.images[row : row + 1],
                proprio=None if sample.proprio is None else sample.proprio[row : row + 1],
                instructions=[sample.instruction],
                trace={name: value[row : row + 1] for name, value in sample.trace.items()},
                action_mask=torch.ones(1, sample.log_probs.shape[1], dtype=torch.bool),
            )
            with torch.no_grad():
                found = policy(**policy.score(one, 1.0), wants=("log_probs",))["log_probs"][0]
            largest = max(largest, float((found - sample.log_probs[row]).abs().max()))
        return largest


@contextmanager
def watching() -> Iterator[Watched]:
    """Watch the runs of the block."""
    seen, play = Watched(), PPOTrainer._play

    def watch(self: PPOTrainer) -> Any:
        seen.weights[self.iteration] = copy.deepcopy(self.algorithm.actor.module).eval()
        rollout = play(self)
        seen.iterations[self.iteration] = rollout.samples
        return rollout

    with mock.patch.object(PPOTrainer, "_play", watch):
        yield seen

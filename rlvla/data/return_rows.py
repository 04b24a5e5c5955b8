"""Observations with their normalized returns: training rows of return models, and inputs of advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlvla.algorithms.recap import ReturnScale
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.rows import observations_of
from rlvla.experience import Experience
from rlvla.models.value_models import ACTION_CHUNK, ActionValuePredictor, ReturnPredictor

_BATCH = 128  # frames in memory at a time
_CONSTANT = 1e-6  # standard deviation of actions that do not vary


def return_scales(demos: Demonstrations, failure_cost: float) -> dict[str, ReturnScale]:
    """The normalization of each task, that is, of each instruction."""
    longest: dict[str, int] = {}
    for instruction, actions in zip(demos.instructions, demos.actions):
        longest[instruction] = max(longest.get(instruction, 1), len(actions))
    return {instruction: ReturnScale(steps, failure_cost) for instruction, steps in longest.items()}


@dataclass(frozen=True)
class ActionScale:
    """Normalization of actions to mean 0 and standard deviation 1; dimensions that do not vary are only shifted.

    Attributes:
        mean: [D].
        std: [D].
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, demos: Demonstrations) -> ActionScale:
        """Of all steps of all episodes."""
        actions = np.concatenate(demos.actions).astype(np.float64)
        std = actions.std(0)
        return cls(tuple(actions.mean(0).tolist()), tuple(np.where(std > _CONSTANT, std, 1.0).tolist()))

    def chunks(self, actions: np.ndarray, steps: np.ndarray, length: int) -> np.ndarray:
        """The normalized chunks of `length` actions from these steps [S] of an episode, [S, length, D] float32.

        Beyond the end of the episode its last action is repeated.
        """
        ahead = actions[np.minimum(steps[:, None] + np.arange(length), len(actions) - 1)]
        return ((ahead - self.mean) / self.std).astype(np.float32)


def with_chunks(
    inputs: Experience, demos: Demonstrations, episodes: Sequence[int], scale: ActionScale, length: int
) -> Experience:
    """Add the action chunks of the decisions to the prepared observations of these episodes."""
    chunks = [scale.chunks(demos.actions[i], demos.row_steps(i), length) for i in episodes]
    return inputs.with_fields(trace={ACTION_CHUNK: torch.from_numpy(np.concatenate(chunks))})


@dataclass
class Transitions:
    """From each decision of some episodes to the next one, which begins where its chunk ends or later.

    Attributes:
        rewards: [M] float32, normalized rewards in between; at the end of an episode with the return of its outcome.
        following: [M] int64, row of the next decision; the row itself if the episode ends before.
        bootstraps: [M] bool, whether there is a next decision.
    """

    rewards: Tensor
    following: Tensor
    bootstraps: Tensor

    @classmethod
    def of(
        cls, demos: Demonstrations, episodes: Sequence[int], scales: Mapping[str, ReturnScale], length: int
    ) -> Transitions:
        """Transitions of chunks of `length` actions."""
        rewards, following, bootstraps, first = [], [], [], 0
        for i in episodes:
            scale, steps = scales[demos.instructions[i]], demos.row_steps(i)
            later, paid = scale.rewards_until(steps, len(demos.actions[i]), length)
            inside = later < len(steps)
            rewards.append(paid + np.where(inside, 0.0, scale.end(demos.success[i])))
            following.append(first + np.where(inside, later, np.arange(len(steps))))
            bootstraps.append(inside)
            first += len(steps)
        columns = [torch.from_numpy(np.concatenate(column)) for column in (rewards, following, bootstraps)]
        return cls(columns[0].float(), columns[1], columns[2])


@dataclass
class ReturnRows:
    """The observations of some episodes.

    Attributes:
        inputs: images, proprio and instructions, M rows.
        returns: [M] float32, normalized returns.
    """

    inputs: Experience
    returns: Tensor

    @classmethod
    def of(
        cls,
        demos: Demonstrations,
        episodes: Sequence[int],
        model: ReturnPredictor,
        scales: dict[str, ReturnScale],
    ) -> ReturnRows:
        """The rows of these episodes in order, prepared for the model."""
        returns = [
            scales[demos.instructions[i]].returns(demos.row_steps(i), len(demos.actions[i]), demos.success[i])
            for i in episodes
        ]
        return cls(observations_of(demos, episodes, model), torch.from_numpy(np.concatenate(returns)).float())


def predicted_returns(model: ReturnPredictor, inputs: Experience, device: torch.device) -> np.ndarray:
    """[M] float32: expected normalized returns of prepared observations."""
    rows = torch.arange(len(inputs)).split(_BATCH)
    return torch.cat([model.expected_returns(inputs.index(part).to(device)).cpu() for part in rows]).numpy()


def predicted_advantages(model: ActionValuePredictor, inputs: Experience, device: torch.device) -> np.ndarray:
    """[M] float32: min Q(s, a) - V(s) of prepared observations with their chunks."""
    rows = torch.arange(len(inputs)).split(_BATCH)
    return torch.cat([model.advantages(inputs.index(part).to(device)).cpu() for part in rows]).numpy()

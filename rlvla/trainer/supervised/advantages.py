"""Advantages of training rows, and labels by them for advantage-conditioned supervised training (RECAP)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from rlvla.algorithms.recap import ReturnScale, positive_labels
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.return_rows import ActionScale, predicted_advantages, predicted_returns, with_chunks
from rlvla.data.rows import observations_of
from rlvla.models.value_models import ActionValuePredictor, ReturnPredictor


@dataclass(frozen=True)
class AdvantageLabels:
    """Labels of all training rows, in the order of `DemonstrationRows`.

    Attributes:
        positive: [M] bool, rows that may carry the condition.
        by_advantage: [M] bool, rows whose label depends on their advantage; the others are positive.
    """

    positive: np.ndarray
    by_advantage: np.ndarray


def rows_by_advantage(demos: Demonstrations, *, demonstrations: bool) -> np.ndarray:
    """[M] bool: rows to label by their advantage: those of a policy, and with `demonstrations` those of demonstrations.

    Rows in which a person or an expert corrects a policy are never among them.
    """
    labelled = []
    for episode in range(len(demos.actions)):
        expert, steps = demos.expert_rows(episode), demos.row_steps(episode)
        corrected = demos.interventions is not None and not demos.interventions[episode].all()
        corrected |= bool(steps[0])  # recorded from the takeover on
        labelled.append(~expert | (demonstrations and not corrected))
    return np.concatenate(labelled)


def advantages_ahead(
    model: ReturnPredictor, scales: Mapping[str, ReturnScale], demos: Demonstrations, device: torch.device, horizon: int
) -> np.ndarray:
    """[M]: N-step advantages of all rows, by a return model on the device; `horizon` in environment steps."""
    advantages = []
    for episode, instruction in enumerate(demos.instructions):
        values = predicted_returns(model, observations_of(demos, [episode], model), device)
        outcome = demos.row_steps(episode), len(demos.actions[episode]), demos.success[episode]
        advantages.append(scales[instruction].advantages(values, *outcome, horizon))
    return np.concatenate(advantages)


def advantages_of_actions(
    model: ActionValuePredictor, actions: ActionScale, demos: Demonstrations, device: torch.device, chunk_len: int
) -> np.ndarray:
    """[M]: min Q(s, a) - V(s) of the chunks of all rows, by a model of implicit Q-learning on the device."""
    advantages = []
    for episode in range(len(demos.actions)):
        inputs = with_chunks(observations_of(demos, [episode], model), demos, [episode], actions, chunk_len)
        advantages.append(predicted_advantages(model, inputs, device))
    return np.concatenate(advantages).astype(np.float64)


def advantage_labels(
    model: ReturnPredictor,
    scales: Mapping[str, ReturnScale],
    demos: Demonstrations,
    device: torch.device,
    *,
    horizon: int,
    share: float,
    demonstrations: bool,
) -> AdvantageLabels:
    """Label the rows of all episodes.

    Args:
        model: the return model, on the device.
        scales: instruction -> normalization of its returns.
        demos: the episodes.
        device: of the model.
        horizon: look-ahead in environment steps.
        share: fraction of the rows of a task, among those labelled by advantage, that are positive.
        demonstrations: label rows of demonstrations by advantage, too.
    """
    advantages = advantages_ahead(model, scales, demos, device, horizon)
    chosen = rows_by_advantage(demos, demonstrations=demonstrations)
    tasks = np.repeat(np.array(demos.instructions, dtype=object), [len(images) for images in demos.images])
    positive = np.ones(len(chosen), bool)
    positive[chosen] = positive_labels(advantages[chosen], tasks[chosen].tolist(), share)
    return AdvantageLabels(positive, chosen)

"""Converts a model's scores of frames to rewards per environment step. Pure functions.

Weights inside a potential that changes: Devlin and Kudenko, "Dynamic Potential-Based Reward Shaping", AAMAS 2012.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FrameJudgment:
    """The model's score of one frame.

    Attributes:
        steps: environment steps since the previous scored frame.
        progress: in [0, 1]; for comparisons of two frames the change itself, in [-1, 1]. None: the request failed.
        action_score: in [0, 1].
        weight: curriculum weight when the frame was scored.
    """

    steps: int
    progress: float | None
    action_score: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True)
class ChainSettings:
    """How scores are converted to rewards; see `VLMConfig`.

    Attributes:
        term: "delta", "potential", "clipped_delta", or "change" (the score is already a change).
        gamma: discount, for "potential".
        action_weight, progress_weight: weights of the two scores.
        scale: factor of the reward.
        weight_inside: with "potential", the curriculum weight is part of the potential.
    """

    term: str = "delta"
    gamma: float = 0.99
    action_weight: float = 0.0
    progress_weight: float = 0.8
    scale: float = 2.0
    weight_inside: bool = True


def progress_term(
    settings: ChainSettings, steps: int, before: float, after: float, weight_before: float, weight_after: float
) -> float:
    """The progress term of a window of `steps` environment steps, the curriculum's weight included."""
    if settings.term == "change":
        return weight_after * after
    if settings.term == "delta":
        return weight_after * (after - before)
    if settings.term == "clipped_delta":
        return weight_after * max(0.0, after - before)
    discount = settings.gamma**steps
    if settings.weight_inside:
        return discount * weight_after * after - weight_before * before
    return weight_after * (discount * after - before)


def spread(value: float, steps: int, gamma: float) -> float:
    """The constant reward per step whose discounted sum over `steps` steps is `value`."""
    return value / sum(gamma**k for k in range(steps))


def chain_rewards(
    first: FrameJudgment, later: Sequence[FrameJudgment], settings: ChainSettings, ends: bool
) -> list[float]:
    """Reward of each environment step of the scored windows.

    A window whose request failed gets no reward, and the previous progress is kept. There is no progress term before
    the first successful score. With "potential", the potential at the end of the episode is 0.

    Args:
        first: score of the frame after the reset; its `steps` are ignored.
        later: scores of the following frames, in order.
        settings: see `ChainSettings`.
        ends: the learner treats the last window as the end of the episode.

    Returns:
        One reward per step of all windows. The rewards of a window sum to its value; with "potential" their discounted
        sum does, so that the potential telescopes.
    """
    rewards: list[float] = []
    last = first if first.progress is not None else None
    gamma = settings.gamma if settings.term == "potential" else 1.0
    for index, now in enumerate(later):
        over = ends and settings.term == "potential" and index == len(later) - 1
        after = 0.0 if over else now.progress
        if after is None:
            rewards += [0.0] * now.steps
            continue
        term = 0.0
        if settings.term == "change":
            term = progress_term(settings, now.steps, 0.0, after, now.weight, now.weight)
        elif last is not None and last.progress is not None:
            term = progress_term(settings, now.steps, last.progress, after, last.weight, now.weight)
        last = now
        action = settings.action_weight * now.weight * now.action_score
        each = spread(action, now.steps, 1.0) + spread(settings.progress_weight * term, now.steps, gamma)
        rewards += [settings.scale * each] * now.steps
    return rewards

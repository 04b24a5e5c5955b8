"""From a model's judgements of frames to a reward per environment step. Pure functions.

Weights inside a potential that changes: Devlin and Kudenko, "Dynamic Potential-Based Reward Shaping", AAMAS 2012.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Judgement:
    """What the model said of one frame.

    Attributes:
        steps: environment steps since the frame judged before.
        progress: in [0, 1]; for comparisons of two frames the change itself, in [-1, 1]. None: the request failed.
        action_score: in [0, 1].
        weight: of the curriculum when the frame was judged.
    """

    steps: int
    progress: float | None
    action_score: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True)
class ChainSettings:
    """How judgements are paid; see `VLMConfig`.

    Attributes:
        term: "delta", "potential", "clipped_delta", or "change" (the judgement is a change already).
        gamma: discount, for "potential".
        action_weight, progress_weight: of the two scores.
        scale: of the whole.
        weight_inside: with "potential", w belongs to p.
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
    """The reward per step which, paid at each of `steps` steps with discount `gamma`, is worth `value`."""
    return value / sum(gamma**k for k in range(steps))


def chain_rewards(first: Judgement, later: Sequence[Judgement], settings: ChainSettings, ends: bool) -> list[float]:
    """Reward of every environment step of the judged windows.

    A failed judgement pays nothing for its window, and the progress before it stays. As long as no frame has been
    judged there is nothing to compare with. A potential ends at 0 with the episode, whatever its last frame was judged.

    Args:
        first: of the frame after the reset (its `steps` do not matter).
        later: of the frames after it, in order.
        settings: how they are paid.
        ends: nothing comes after the last window, as the learner sees it.

    Returns:
        As many floats as the windows have steps together. A window's sum is its value; with "potential" its
        discounted sum is, so that it telescopes at any discount.
    """
    rewards: list[float] = []
    known = first if first.progress is not None else None
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
        elif known is not None and known.progress is not None:
            term = progress_term(settings, now.steps, known.progress, after, known.weight, now.weight)
        known = now
        action = settings.action_weight * now.weight * now.action_score
        each = spread(action, now.steps, 1.0) + spread(settings.progress_weight * term, now.steps, gamma)
        rewards += [settings.scale * each] * now.steps
    return rewards

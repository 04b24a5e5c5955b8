"""From an episode's score and events to token-level rewards on its flat grid of action tokens.

An episode's tokens are flattened in order (action index, action dimension): token t belongs to env step
t // action_dim. An episode that executed `finish_step` env steps owns the tokens below finish_step * action_dim; what
the policy sampled beyond them was never executed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_number, check_same_shape, clean, working_dtype


def token_mask(finish_step: Tensor, num_tokens: int, action_dim: int) -> Tensor:
    """Which tokens of each episode were executed.

    Args:
        finish_step: [B] integer, env steps executed.
        num_tokens: T, length of the flat token grid.
        action_dim: tokens per env step.

    Returns:
        [B, T] bool, True below finish_step * action_dim.

    Raises:
        ValueError: not [B] integers, or an episode that does not fit into the grid.
    """
    last = _valid_tokens(finish_step, num_tokens, action_dim)
    return torch.arange(num_tokens, device=finish_step.device) < last.unsqueeze(-1)


def assemble_rewards(
    finish_step: Tensor,
    num_tokens: int,
    action_dim: int,
    *,
    scores: Tensor | None = None,
    step_rewards: Tensor | None = None,
    score_range: tuple[float, float] | None = None,
) -> Tensor:
    """Token-level rewards: the episode score at the last executed token, each env step's reward at its last token.

    Args:
        finish_step: [B] integer, env steps executed, at least 1.
        num_tokens: T, length of the flat token grid.
        action_dim: tokens per env step.
        scores: [B], one number per episode.
        step_rewards: [B, T / action_dim], one number per env step; entries from finish_step on are ignored.
        score_range: (low, high) to which the scores are clipped first.

    Returns:
        [B, T]; float64 if an input is, float32 otherwise.

    Raises:
        ValueError: neither scores nor step_rewards, shapes that do not fit, an episode without an executed step, or an
            empty score range.
    """
    if scores is None and step_rewards is None:
        raise ValueError("there is nothing to place: pass scores, step_rewards or both")
    mask = token_mask(finish_step, num_tokens, action_dim)
    if len(finish_step) and int(finish_step.min()) < 1:
        raise ValueError(f"every episode needs at least one executed step, got finish_step {int(finish_step.min())}")
    dtype = working_dtype(scores, step_rewards)
    rewards = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    if step_rewards is not None:
        expected = (len(mask), num_tokens // action_dim)
        if num_tokens % action_dim or tuple(step_rewards.shape) != expected:
            raise ValueError(
                f"step_rewards has shape {list(step_rewards.shape)} but {num_tokens} tokens of {action_dim} dimensions "
                f"are {list(expected)} env steps"
            )
        rewards[:, action_dim - 1 :: action_dim] = step_rewards.to(dtype)
        rewards = clean(rewards, mask, dtype)
    if scores is not None:
        if tuple(scores.shape) != (len(mask),):
            raise ValueError(
                f"scores has shape {list(scores.shape)} but finish_step has shape {list(finish_step.shape)}"
            )
        last = finish_step.long().unsqueeze(-1) * action_dim - 1
        rewards.scatter_add_(1, last, clip_scores(scores, score_range).to(dtype).unsqueeze(-1))
    return rewards


def clip_scores(scores: Tensor, score_range: tuple[float, float] | None) -> Tensor:
    """Scores clipped to (low, high); unchanged for None.

    Raises:
        ValueError: low above high, or NaN.
    """
    if score_range is None:
        return scores
    low, high = score_range
    if not low <= high:
        raise ValueError(f"score_range must be (low, high) with low <= high, got {score_range}")
    return scores.clamp(low, high)


def add_kl_penalty(token_level_rewards: Tensor, kl: Tensor, response_mask: Tensor, coef: float) -> Tensor:
    """Rewards - coef * kl on the valid tokens, 0 elsewhere.

    Args:
        token_level_rewards: [B, T].
        kl: [B, T], from `kl.kl_penalty`.
        response_mask: [B, T] bool.
        coef: the KL coefficient, not negative.

    Returns:
        [B, T] without gradient: a reward is a number, not a path to the policy.

    Raises:
        ValueError: shapes differ, mask not bool, or a negative coefficient.
    """
    check_same_shape(response_mask, token_level_rewards=token_level_rewards, kl=kl)
    check_number("coef", coef, low=0.0)
    dtype = working_dtype(token_level_rewards, kl)
    penalty = clean(kl.detach(), response_mask, dtype)
    return clean(token_level_rewards.detach(), response_mask, dtype) - coef * penalty


def _valid_tokens(finish_step: Tensor, num_tokens: int, action_dim: int) -> Tensor:
    if finish_step.dim() != 1 or finish_step.is_floating_point() or finish_step.dtype == torch.bool:
        raise ValueError(f"finish_step must be [B] integers, got {list(finish_step.shape)} of {finish_step.dtype}")
    if action_dim < 1:
        raise ValueError(f"action_dim must be at least 1, got {action_dim}")
    last = finish_step.long() * action_dim
    if len(last) and (int(last.min()) < 0 or int(last.max()) > num_tokens):
        raise ValueError(
            f"finish_step lies in [{int(finish_step.min())}, {int(finish_step.max())}] but a grid of "
            f"{num_tokens} tokens of {action_dim} dimensions holds 0 to {num_tokens // action_dim} steps"
        )
    return last

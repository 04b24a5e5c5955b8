"""Estimators that compare episodes started from the same state: one number per row, spread over its tokens.

A row alone in its group has nothing to be compared with; unless the estimator says otherwise its baseline is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.advantages.registry import register_advantage_estimator
from rlvla.algorithms.checks import check_matrix, check_same_shape, clean, require_input, working_dtype
from rlvla.algorithms.groups import GroupIds, Groups

STD_EPSILON = 1e-6


@register_advantage_estimator("grpo")
@torch.no_grad()
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: GroupIds | None = None,
    norm_by_std: bool = True,
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """(s - mean_g) / (std_g + 1e-6) (GRPO, Shao et al. 2024), or s - mean_g (Dr. GRPO, Liu et al. 2025).

    s is the sum of a row's rewards over its valid tokens, std has ddof 1; a group of one has mean 0 and std 1.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T] bool.
        group_ids: one hashable id per row.
        norm_by_std: False leaves out the division.
        **extra: arguments of other estimators, unused.

    Returns:
        advantages and returns: the same [B, T], 0 outside the mask.

    Raises:
        ValueError: `group_ids` missing or not one per row, shapes differ, mask not bool.
    """
    scores, groups = _scores_and_groups("grpo", token_level_rewards, response_mask, group_ids)
    return _spread(_normalise(scores, groups, norm_by_std), token_level_rewards, response_mask)


def row_scores(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B] float64, the sum of each row's valid rewards.

    Float64 whatever the input: equal scores must have a group std of 0 and not of rounding noise, which the division
    by std + 1e-6 would blow up.
    """
    return clean(rewards, mask, torch.float64).sum(-1)


def _scores_and_groups(name: str, rewards: Tensor, mask: Tensor, group_ids: GroupIds | None) -> tuple[Tensor, Groups]:
    require_input("group_ids", group_ids, f"advantage estimator {name!r}")
    assert group_ids is not None
    check_matrix(mask)
    check_same_shape(mask, token_level_rewards=rewards)
    return row_scores(rewards, mask), Groups(group_ids, len(mask), mask.device)


def _centre(scores: Tensor, groups: Groups) -> Tensor:
    """[B] -> [B], scores minus their group mean; a row alone keeps its score."""
    return torch.where(groups.size > 1, scores - groups.mean(scores), scores)


def _normalise(scores: Tensor, groups: Groups, by_std: bool) -> Tensor:
    """[B] -> [B], centred and, if asked, divided by the group std (1 in a group of one)."""
    centred = _centre(scores, groups)
    if not by_std:
        return centred
    std = torch.where(groups.size > 1, groups.std(scores), torch.ones_like(scores))
    return centred / (std + STD_EPSILON)


def _spread(row_values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B] -> two [B, T], each row's value on its valid tokens."""
    dtype = working_dtype(rewards)
    advantages = clean(row_values.unsqueeze(-1).expand(mask.shape), mask, dtype)
    return advantages, advantages.clone()

"""The variance-optimal baseline of each token position within a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.advantages.registry import register_advantage_estimator
from rlvla.algorithms.advantages.temporal import returns_to_go
from rlvla.algorithms.checks import (
    check_matrix,
    check_same_shape,
    count_valid_per_row,
    require_input,
    working_dtype,
)
from rlvla.algorithms.groups import GroupIds, Groups
from rlvla.algorithms.lazy import no_grad, torch
from rlvla.options import Options, arg

if TYPE_CHECKING:
    from torch import Tensor


_WEIGHT_EPSILON = 1e-8


@dataclass(frozen=True)
class TokenBaselineOptions(Options):
    """Positions that only one episode of a group reaches."""

    handle_zero_tail: bool = arg(True, "no baseline at steps that only one episode of the group reaches")


@register_advantage_estimator("optimal_token_baseline", options=TokenBaselineOptions)
@no_grad
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: GroupIds | None = None,
    old_log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    rollout_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """Return-to-go minus the variance-optimal baseline of each position (optimal token baseline, 2026).

    A_t = G_t - b_t with b_t = sum_g(G_t W_t) / (sum_g W_t + 1e-8) over the rows valid at t. W_t is the running sum over
    valid tokens of w_t = 1 - 2 pi_t + sum pi^2, the squared norm of the score function of a softmax. A group of one has
    baseline 0.

    Args:
        old_log_probs: [B, T], log pi_t of the sampled token; 0 at columns without policy loss (rejected by the rollout
            correction, or of an action dimension that never moves), see `sum_pi_squared`.
        sum_pi_squared: [B, T], sum of the squared probabilities of all tokens; 1 at columns without policy loss, which
            with pi_t = 1 gives w_t = 0: they have no gradient and do not raise the weight of their row.
        rollout_weights: [B, T] importance weights, whose square multiplies w_t, or None.
        handle_zero_tail: the longest row of a group has baseline 0 beyond the second-longest length, where its baseline
            would be its own return.

    Returns:
        advantages: [B, T].
        returns: [B, T], the undiscounted return-to-go.
    """
    user = "advantage estimator 'optimal_token_baseline'"
    require_input("group_ids", group_ids, user)
    assert group_ids is not None
    old_log_probs = require_input("old_log_probs", old_log_probs, user)
    sum_pi_squared = require_input("sum_pi_squared", sum_pi_squared, user)
    mask = response_mask
    check_matrix(mask)
    check_same_shape(
        mask,
        token_level_rewards=token_level_rewards,
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
        rollout_weights=rollout_weights,
    )
    dtype = working_dtype(token_level_rewards, old_log_probs, sum_pi_squared)
    returns = returns_to_go(token_level_rewards.to(dtype), mask, 1.0)
    weight = _running_energy(old_log_probs.to(dtype), sum_pi_squared, mask, rollout_weights)
    groups = Groups(group_ids, len(mask), mask.device)
    per_group = groups.sum_per_group(weight * returns) / (groups.sum_per_group(weight) + _WEIGHT_EPSILON)
    per_group.masked_fill_((groups.sizes == 1).unsqueeze(-1), 0.0)
    baseline = per_group[groups.index]
    if handle_zero_tail:
        _zero_tail_baseline(baseline, mask, groups)
    return (returns - baseline).masked_fill_(~mask, 0.0), returns


def _running_energy(log_probs: Tensor, sum_pi_squared: Tensor, mask: Tensor, rollout_weights: Tensor | None) -> Tensor:
    """W_t, [B, T], 0 outside the mask."""
    energy = log_probs.exp().mul_(-2.0).add_(1.0).add_(sum_pi_squared)
    if rollout_weights is not None:
        energy.mul_(rollout_weights.to(log_probs.dtype).square())
    return energy.masked_fill_(~mask, 0.0).cumsum_(-1).masked_fill_(~mask, 0.0)


def _zero_tail_baseline(baseline: Tensor, mask: Tensor, groups: Groups) -> None:
    """Zero the baseline of the single longest row of each group beyond the second-longest length, in place."""
    length = count_valid_per_row(mask)
    longest = groups.first_where(length == groups.max(length))
    second = groups.max(length.masked_fill(longest, -1.0))  # equals the longest if several rows have it
    rows = (longest & (length > second)).nonzero().squeeze(-1)
    tail = torch.arange(mask.shape[-1], device=mask.device) >= second[rows].unsqueeze(-1)
    baseline[rows] = baseline[rows].masked_fill_(tail, 0.0)

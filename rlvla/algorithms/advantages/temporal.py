"""Estimators based on returns over time: GAE, REINFORCE, REINFORCE++, ReMax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.advantages.registry import register_advantage_estimator
from rlvla.algorithms.checks import check_matrix, check_number, check_same_shape, clean, require_input, working_dtype
from rlvla.algorithms.lazy import no_grad, torch
from rlvla.algorithms.masking import EPSILON, masked_moments, masked_whiten
from rlvla.options import Options, arg

if TYPE_CHECKING:
    from torch import Tensor


_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class GAEOptions(Options):
    """Bias-variance trade-off."""

    lambd: float = arg(1.0, "lambda of gae", minimum=0, maximum=1, argument="lam", aliases=("lam", "gae_lambda"))


@register_advantage_estimator("gae", options=GAEOptions)
@no_grad
def gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    process_group: Any = None,
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016), whitened over the mask.

    The value after the last valid token of a row is 0, as for a terminated episode. To bootstrap from a truncated
    episode, add gamma * V(final observation) to the reward of the last valid token. Tokens outside the mask are
    skipped: the next value and the running advantage pass through them unchanged.

    Returns:
        advantages: [B, T], whitened.
        returns: [B, T], advantage before whitening + value.
    """
    values = require_input("values", values, "advantage estimator 'gae'")
    _check(token_level_rewards, response_mask, gamma, values=values)
    check_number("lam", lam, low=0.0, high=1.0)
    dtype = working_dtype(token_level_rewards, values)
    advantages = torch.empty(response_mask.shape, dtype=dtype, device=response_mask.device)
    returns = torch.empty_like(advantages)
    for rows in _row_blocks(response_mask):
        mask = response_mask[rows]
        kept = clean(values[rows], mask, dtype)
        raw = _gae_backward(clean(token_level_rewards[rows], mask, dtype), kept, mask, gamma, lam)
        advantages[rows] = raw
        returns[rows] = (raw + kept).masked_fill_(~mask, 0.0)
    mean, variance = masked_moments(advantages, response_mask, process_group=process_group)
    advantages.sub_(mean).mul_(torch.rsqrt(variance + EPSILON)).masked_fill_(~response_mask, 0.0)
    return advantages, returns


@register_advantage_estimator("reinforce")
@no_grad
def reinforce(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0, **extra: Any
) -> tuple[Tensor, Tensor]:
    """Discounted return-to-go without a baseline (Williams 1992)."""
    _check(token_level_rewards, response_mask, gamma)
    returns = returns_to_go(token_level_rewards, response_mask, gamma)
    return returns, returns.clone()


@register_advantage_estimator("reinforce_plus_plus")
@no_grad
def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    process_group: Any = None,
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """Discounted return-to-go, whitened over the batch (REINFORCE++, Hu et al. 2025).

    Returns:
        advantages: [B, T], whitened.
        returns: [B, T], return-to-go before whitening.
    """
    _check(token_level_rewards, response_mask, gamma)
    returns = returns_to_go(token_level_rewards, response_mask, gamma)
    whitened = masked_whiten(returns, response_mask, process_group=process_group)
    return clean(whitened, response_mask, returns.dtype), returns


@register_advantage_estimator("remax")
@no_grad
def remax(
    token_level_rewards: Tensor, response_mask: Tensor, *, reward_baselines: Tensor | None = None, **extra: Any
) -> tuple[Tensor, Tensor]:
    """Undiscounted return-to-go minus the reward of the greedy episode from the same state (ReMax, Li et al. 2023).

    Undiscounted because the baseline is a total reward.

    Returns:
        advantages: [B, T].
        returns: [B, T], the return-to-go.
    """
    reward_baselines = require_input("reward_baselines", reward_baselines, "advantage estimator 'remax'")
    _check(token_level_rewards, response_mask, 1.0)
    if tuple(reward_baselines.shape) != tuple(response_mask.shape[:1]):
        raise ValueError(
            f"reward_baselines has shape {list(reward_baselines.shape)} but response_mask has shape "
            f"{list(response_mask.shape)}; one baseline per row is expected"
        )
    returns = returns_to_go(token_level_rewards, response_mask, 1.0)
    dtype = working_dtype(returns, reward_baselines)
    advantages = returns.to(dtype) - reward_baselines.to(dtype).unsqueeze(-1)
    return clean(advantages, response_mask, dtype), returns.to(dtype)


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each valid token on.

    Args:
        rewards: [B, T].
        mask: [B, T] bool; a token outside the mask neither contributes nor discounts.
        gamma: discount per valid token.

    Returns:
        [B, T], 0 outside the mask.
    """
    kept = clean(rewards, mask, working_dtype(rewards))
    if gamma == 1.0:
        return kept.flip(-1).cumsum_(-1).flip(-1).masked_fill_(~mask, 0.0)
    for rows in _row_blocks(mask):
        zero_values = torch.zeros_like(kept[rows])
        returns = _gae_backward(kept[rows], zero_values, mask[rows], gamma, 1.0)
        kept[rows] = returns.masked_fill_(~mask[rows], 0.0)
    return kept


def _gae_backward(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages [B, T] before whitening; a token outside the mask gets the value of the next one."""
    rewards_t, values_t, mask_t = rewards.t().contiguous(), values.t().contiguous(), mask.t().contiguous()
    result = torch.empty_like(rewards_t)
    next_value, running = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in range(len(rewards_t) - 1, -1, -1):
        delta = rewards_t[t] + gamma * next_value - values_t[t]
        running = torch.where(mask_t[t], delta + gamma * lam * running, running)
        next_value = torch.where(mask_t[t], values_t[t], next_value)
        result[t] = running
    return result.t()


def _row_blocks(mask: Tensor) -> list[slice]:
    """Slices of rows small enough to stay in the CPU cache; none for an empty batch."""
    return [slice(start, start + _BLOCK_ROWS) for start in range(0, len(mask) if mask.shape[-1] else 0, _BLOCK_ROWS)]


def _check(rewards: Tensor, mask: Tensor, gamma: float, values: Tensor | None = None) -> None:
    check_matrix(mask)
    check_same_shape(mask, token_level_rewards=rewards, values=values)
    check_number("gamma", gamma, low=0.0, high=1.0)

"""Group-relative estimators: episodes from the same initial state are compared, one advantage per row.

A row that is alone in its group has baseline 0 unless the estimator says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.advantages.registry import register_advantage_estimator
from rlvla.algorithms.checks import (
    check_matrix,
    check_same_shape,
    clean,
    count_valid_per_row,
    require_input,
    working_dtype,
)
from rlvla.algorithms.groups import GroupIds, Groups
from rlvla.algorithms.lazy import no_grad, torch
from rlvla.algorithms.masking import all_reduce_sum, whiten_rows
from rlvla.options import Condition, Options, arg

if TYPE_CHECKING:
    from torch import Tensor


STD_EPSILON = 1e-6
# std + epsilon = 1 + 1e-6 in single precision for a group of one: published GRPO numbers are computed that way
_LONE_DIVISOR = 1.0 + 2.0**-20
_SUM_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class GroupNormOptions(Options):
    """Normalization within a group."""

    norm_adv_by_std: bool = arg(
        True,
        "grpo, grpo_passk, gdpo: divide by the standard deviation of the group (off with grpo: Dr. GRPO)",
        argument="norm_by_std",
        aliases=("norm_adv_by_std_in_grpo",),
    )


@register_advantage_estimator("grpo", options=GroupNormOptions, per_episode=True)
@no_grad
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
    `norm_by_std=False` skips the division.
    """
    scores, groups = _scores_and_groups("grpo", token_level_rewards, response_mask, group_ids)
    return _broadcast(_normalize(scores, groups, norm_by_std), token_level_rewards, response_mask)


@register_advantage_estimator("grpo_passk", options=GroupNormOptions, per_episode=True)
@no_grad
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: GroupIds | None = None,
    norm_by_std: bool = True,
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """Pass@k training (Tang et al. 2025): only the best row of a group has an advantage, its lead over the second.

    (max - second) / (std_g + 1e-6), or max - second with `norm_by_std=False`. All other rows get 0, as do all rows of a
    group whose best score is shared.

    Raises:
        ValueError: a group of one.
    """
    scores, groups = _scores_and_groups("grpo_passk", token_level_rewards, response_mask, group_ids)
    alone = int((groups.sizes < 2).sum())
    if alone:
        raise ValueError(f"grpo_passk compares the two best rows of a group, but {alone} groups have one row only")
    best = groups.first_where(scores == groups.max(scores))
    second = groups.max(scores.masked_fill(best, -torch.inf))
    lead = scores - second
    if norm_by_std:
        lead = lead / (groups.std(scores) + STD_EPSILON)
    return _broadcast(torch.where(best, lead, torch.zeros_like(lead)), token_level_rewards, response_mask)


@register_advantage_estimator("gdpo", options=GroupNormOptions, per_episode=True)
@no_grad
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: GroupIds | None = None,
    norm_by_std: bool = True,
    component_rewards: Mapping[str, Tensor] | Sequence[Tensor] | Tensor | None = None,
    component_weights: Mapping[str, float] | Sequence[float] | Tensor | None = None,
    process_group: Any = None,
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """Decoupled normalization (GDPO, Liu et al. 2026): reward components are GRPO-normalized separately, then summed.

    Args:
        token_level_rewards: [B, T]; the sum of the components, used for its shape and dtype only.
        component_rewards: name -> [B] or [B, T]; or a sequence of such tensors; or one tensor [B, K] or [B, T, K].
        component_weights: name -> weight, or K numbers; 1 each by default.

    Returns:
        The advantages twice, whitened over the batch.

    Raises:
        ValueError: the weights do not match the components.
    """
    require_input("component_rewards", component_rewards, "advantage estimator 'gdpo'")
    assert component_rewards is not None
    components = _named_components(component_rewards)
    groups = _groups("gdpo", token_level_rewards, response_mask, group_ids)
    weights = _named_weights(component_weights, list(components))
    total = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    for name, rewards in components.items():
        component = _component_scores(name, rewards, response_mask)
        total += weights[name] * _normalize(component, groups, norm_by_std)
    whitened = whiten_rows(total, count_valid_per_row(response_mask), process_group)
    return _broadcast(whitened, token_level_rewards, response_mask)


@dataclass(frozen=True)
class RLOOOptions(Options):
    """Groups of one episode."""

    singleton: str = arg(
        "raw",
        "rloo with --n_samples_per_prompt 1: the advantage is the score (raw) or 0",
        choices=("raw", "zero"),
        read_if=Condition(lambda flags: flags["n_samples_per_prompt"] <= 1, "no group has a single episode"),
    )


@register_advantage_estimator("rloo", options=RLOOOptions, per_episode=True, allows_singletons=True)
@no_grad
def rloo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: GroupIds | None = None,
    singleton: str = "raw",
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """Leave-one-out baseline (Ahmadian et al. 2024): s minus the mean of the other rows of the group.

    Args:
        singleton: advantage of a row that is alone in its group: "raw" is its score, "zero" is 0.
    """
    if singleton not in ("raw", "zero"):
        raise ValueError(f"singleton must be 'raw' or 'zero', got {singleton!r}")
    scores, groups = _scores_and_groups("rloo", token_level_rewards, response_mask, group_ids)
    size = groups.size.to(scores.dtype)
    others = (scores - groups.mean(scores)) * (size / (size - 1).clamp(min=1))
    lone = scores if singleton == "raw" else torch.zeros_like(scores)
    return _broadcast(torch.where(size > 1, others, lone), token_level_rewards, response_mask)


@register_advantage_estimator("opo", per_episode=True)
@no_grad
def opo(
    token_level_rewards: Tensor, response_mask: Tensor, *, group_ids: GroupIds | None = None, **extra: Any
) -> tuple[Tensor, Tensor]:
    """Length-weighted baseline (OPO, Hao et al. 2025): s - sum_g(len s) / sum_g(len), len = valid tokens."""
    scores, groups = _scores_and_groups("opo", token_level_rewards, response_mask, group_ids)
    length = count_valid_per_row(response_mask).to(scores.dtype)
    baseline = groups.sum(length * scores) / groups.sum(length).clamp(min=1)
    baseline = torch.where(groups.constant(scores), scores, baseline)  # without rounding error
    advantages = torch.where(groups.size > 1, scores - baseline, scores)
    return _broadcast(advantages, token_level_rewards, response_mask)


@register_advantage_estimator("reinforce_baseline", per_episode=True)
@no_grad
def reinforce_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: GroupIds | None = None,
    process_group: Any = None,
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """S - mean_g, whitened over the valid tokens of the batch (REINFORCE++-baseline, Hu et al. 2025)."""
    scores, groups = _scores_and_groups("reinforce_baseline", token_level_rewards, response_mask, group_ids)
    whitened = whiten_rows(_center(scores, groups), count_valid_per_row(response_mask), process_group)
    return _broadcast(whitened, token_level_rewards, response_mask)


@dataclass(frozen=True)
class GPGOptions(Options):
    """Scale of the advantages."""

    f_norm: float = arg(1.0, "gpg estimator: divisor of the advantages", above=0)


@register_advantage_estimator("gpg", options=GPGOptions, per_episode=True)
@no_grad
def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: GroupIds | None = None,
    f_norm: float = 1.0,
    process_group: Any = None,
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """Group policy gradient (GPG, Chu et al. 2025): B / count_nonzero(s) * (s - mean_g) / f_norm.

    Args:
        f_norm: divisor, not 0.
        process_group: rows and non-zero scores are counted over all ranks.
    """
    if f_norm == 0 or f_norm != f_norm:
        raise ValueError(f"f_norm must be a number other than 0, got {f_norm}")
    scores, groups = _scores_and_groups("gpg", token_level_rewards, response_mask, group_ids)
    counts = torch.stack([torch.tensor(len(scores), device=scores.device), torch.count_nonzero(scores)])
    rows, nonzero = all_reduce_sum(counts, process_group)
    advantages = rows.to(scores.dtype) / nonzero.clamp(min=1) * _center(scores, groups) / f_norm
    return _broadcast(advantages, token_level_rewards, response_mask)


def row_scores(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B] float64, the sum of each row's valid rewards.

    Always in float64: rounding noise in the std of equal scores would be amplified by the division by std + 1e-6.
    """
    kept = clean(rewards, mask, working_dtype(rewards))
    # In blocks: a float64 copy of a large batch would take longer than the sums.
    return torch.cat([block.sum(-1, dtype=torch.float64) for block in kept.split(_SUM_BLOCK_ROWS)])


def _scores_and_groups(name: str, rewards: Tensor, mask: Tensor, group_ids: GroupIds | None) -> tuple[Tensor, Groups]:
    groups = _groups(name, rewards, mask, group_ids)
    return row_scores(rewards, mask), groups


def _groups(name: str, rewards: Tensor, mask: Tensor, group_ids: GroupIds | None) -> Groups:
    require_input("group_ids", group_ids, f"advantage estimator {name!r}")
    assert group_ids is not None
    check_matrix(mask)
    check_same_shape(mask, token_level_rewards=rewards)
    return Groups(group_ids, len(mask), mask.device)


def _center(scores: Tensor, groups: Groups) -> Tensor:
    """[B] -> [B], scores minus their group mean; a group of one keeps its score."""
    return torch.where(groups.size > 1, scores - groups.mean(scores), scores)


def _normalize(scores: Tensor, groups: Groups, by_std: bool) -> Tensor:
    """[B] -> [B], centered and optionally divided by the group std (1 in a group of one)."""
    centered = _center(scores, groups)
    if not by_std:
        return centered
    divisor = groups.std(scores) + STD_EPSILON
    return centered / torch.where(groups.size > 1, divisor, torch.full_like(divisor, _LONE_DIVISOR))


def _broadcast(row_values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B] -> [B, T] twice, each row's value on its valid tokens."""
    dtype = working_dtype(rewards)
    advantages = torch.where(mask, row_values.to(dtype).unsqueeze(-1), torch.zeros((), dtype=dtype, device=mask.device))
    return advantages, advantages.clone()


def _named_components(components: Mapping[str, Tensor] | Sequence[Tensor] | Tensor) -> dict[str, Tensor]:
    if isinstance(components, torch.Tensor):
        if components.dim() < 2:
            raise ValueError(f"component_rewards has shape {list(components.shape)}; expected [B, K] or [B, T, K]")
        components = list(components.unbind(-1))
    if not isinstance(components, Mapping):
        components = {str(number): rewards for number, rewards in enumerate(components)}
    if not components:
        raise ValueError("component_rewards is empty; gdpo needs at least one reward component")
    return dict(components)


def _named_weights(
    weights: Mapping[str, float] | Sequence[float] | Tensor | None, names: list[str]
) -> dict[str, float]:
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if not isinstance(weights, Mapping):
        if len(weights) != len(names):
            raise ValueError(f"component_weights has {len(weights)} entries but there are {len(names)} components")
        weights = dict(zip(names, weights))
    if set(weights) != set(names):
        raise ValueError(f"component_weights names {sorted(weights)} but the components are {sorted(names)}")
    return {name: float(weight) for name, weight in weights.items()}


def _component_scores(name: str, rewards: Tensor, mask: Tensor) -> Tensor:
    """[B] or [B, T] -> [B] float64; a row without valid tokens scores 0."""
    if rewards.shape == mask.shape[:1]:
        return clean(rewards, mask.any(-1), torch.float64)
    check_same_shape(mask, "response_mask", **{f"component_rewards[{name!r}]": rewards})
    return row_scores(rewards, mask)

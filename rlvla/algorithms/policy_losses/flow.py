"""Losses of flow-matching policies: DPPO and FPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.checks import count_valid
from rlvla.algorithms.masking import EPSILON
from rlvla.algorithms.policy_losses.clipped import pessimistic
from rlvla.algorithms.policy_losses.common import LOG_RATIO_BOUND, check_clip, prepare
from rlvla.algorithms.policy_losses.registry import register_policy_loss
from rlvla.options import Options, arg

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DPPOOptions(Options):
    """Discount and clip widths over denoising steps."""

    denoising_gamma: float = arg(
        0.99, "factor on the advantage for each denoising step before the last", minimum=0, maximum=1
    )
    denoising_clip: tuple[float, ...] = arg(
        (0.001, 0.01),
        "clip widths of the ratio at the first and at the last denoising step",
        above=0,
        nargs=2,
        metavar="EPS",
        check=(lambda widths: len(widths) == 2 and widths[0] <= widths[1], "give two widths, first <= last"),
    )


@register_policy_loss("dppo", options=DPPOOptions, scores="step_log_probs")
def dppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    column_shape: tuple[int, int, int] | None = None,
    denoising_gamma: float = 0.99,
    denoising_clip: tuple[float, float] = (0.001, 0.01),
    rollout_weights: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate with a ratio for each denoising step (DPPO, Ren et al. 2024, arXiv 2409.00588).

    The mean over the S steps of `rlvla.algorithms.flow.dppo_loss`, with the row's mean advantage. Always averaged over
    rows, as in `geo_mean`; there is no per-token loss.

    Args:
        log_probs: [B, A * S * D] of the elements of all steps.
        column_shape: (A, S, D); None for a single step of a single action.
        denoising_gamma: factor on the advantage for each step before the last, in [0, 1].
        denoising_clip: clip widths at the first and at the last step.

    Returns:
        Loss and metrics; `pg_clipfrac` is the fraction of the steps of valid rows that were clipped.

    Raises:
        ValueError: besides the common ones, columns that `column_shape` does not fit.
    """
    from rlvla.algorithms.flow.objectives import denoising_clip as clip_widths
    from rlvla.algorithms.flow.objectives import dppo_loss

    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    rows, width = response_mask.shape
    actions, steps, dims = column_shape or (1, 1, width)
    if actions * steps * dims != width:
        raise ValueError(f"{width} columns are not {actions} actions x {steps} steps x {dims} dimensions")

    def by_step(values: Tensor) -> Tensor:
        return values.view(rows, actions, steps, dims).transpose(1, 2)

    loss, clipped = dppo_loss(
        by_step(inputs.log_probs),  # 0 outside the mask, on both sides
        by_step(inputs.old_log_probs),
        inputs.row_mean(inputs.advantages),
        gamma=denoising_gamma,
        clip=clip_widths(steps, base=denoising_clip[0], top=denoising_clip[1]),
    )
    valid = inputs.mask.any(-1)
    fraction = count_valid(clipped & valid[:, None]) / (count_valid(valid) * steps + EPSILON)
    metrics = inputs.metrics(inputs.log_ratio) | {"pg_clipfrac": fraction.to(loss.dtype)}
    return inputs.mean_over_rows(loss.mean(-1), extra), metrics


@dataclass(frozen=True)
class FPOOptions(Options):
    """Clip width."""

    fpo_clip: float = arg(0.05, "the ratio is clipped to 1 +- this", above=0)


@register_policy_loss("fpo", options=FPOOptions, scores="matching")
def fpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    fpo_clip: float = 0.05,
    rollout_weights: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate with the change of the flow-matching loss in place of the log-ratio (FPO, 2025).

    A surrogate, not a density ratio; see docs/algorithms/loss_fpo.md for its bias. The log-ratio of a row is the sum of
    its columns (`rlvla.algorithms.flow.fpo_log_ratio`), bounded by +-20, its advantage their mean. Always averaged over
    rows, as in `geo_mean`; there is no per-token loss.

    Args:
        log_probs: [B, T], terms whose sum is minus the mean flow-matching loss of a row; terms of actions that were not
            executed are outside the mask.
        fpo_clip: the ratio is clipped to 1 +- this.

    Returns:
        Loss and metrics; `pg_clipfrac` is the fraction of valid rows that were clipped.
    """
    from rlvla.algorithms.flow.objectives import fpo_log_ratio

    check_clip(fpo_clip, fpo_clip)
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    log_ratio = fpo_log_ratio(-inputs.old_log_probs.sum(-1, keepdim=True), -inputs.log_probs.sum(-1, keepdim=True))
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    loss, clipped = pessimistic(inputs.row_mean(inputs.advantages), ratio, fpo_clip, fpo_clip)
    valid = inputs.mask.any(-1)
    fraction = count_valid(clipped & valid) / (count_valid(valid) + EPSILON)
    metrics = inputs.metrics(inputs.log_ratio) | {"pg_clipfrac": fraction.to(loss.dtype)}
    return inputs.mean_over_rows(loss, extra), metrics

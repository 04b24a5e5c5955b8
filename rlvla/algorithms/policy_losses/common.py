"""Shared by all policy losses: input checks, aggregation, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.checks import (
    check_matrix,
    check_number,
    check_same_shape,
    clean,
    count_valid,
    count_valid_per_row,
    working_dtype,
)
from rlvla.algorithms.lazy import torch
from rlvla.algorithms.losses import aggregate_loss
from rlvla.algorithms.masking import EPSILON
from rlvla.options import Options, arg

if TYPE_CHECKING:
    from torch import Tensor


LOG_RATIO_BOUND = 20.0
_WEIGHT_FLOOR = 1e-10
_AGGREGATION_OPTIONS = ("num_tokens", "num_sequences", "dp_size", "horizon", "trajectory_ids", "trajectory_tokens")


TWO_WIDTHS = "give two widths, low <= high"


@dataclass(frozen=True)
class ClipOptions(Options):
    """Bounds of the probability ratio."""

    eps_clip: float = arg(
        0.2,
        "the ratio is clipped to 1 +- this (typically 3e-4 to 0.05 for gspo, 0.4 for geo_mean)",
        above=0,
        aliases=("clip_ratio", "cliprange", "epsilon"),
    )
    eps_clip_low_high: tuple[float, ...] = arg(
        (),
        "two clip widths instead of --eps_clip: below and above 1, e.g. 0.2 0.28",
        above=0,
        metavar="EPS",
        check=(lambda widths: len(widths) == 2 and widths[0] <= widths[1], TWO_WIDTHS),
    )

    @property
    def clip(self) -> tuple[float, float]:
        """The clip widths (low, high) of the ratio."""
        low, high = self.eps_clip_low_high or (self.eps_clip, self.eps_clip)
        return low, high

    def arguments(self) -> dict[str, Any]:
        """`clip_low`, `clip_high`, and the other options."""
        arguments = super().arguments()
        del arguments["eps_clip"], arguments["eps_clip_low_high"]
        return {"clip_low": self.clip[0], "clip_high": self.clip[1], **arguments}


@dataclass(frozen=True)
class DualClipOptions(ClipOptions):
    """Bounds of the probability ratio, with a cap."""

    eps_clip_dual: float | None = arg(
        None,
        "ppo: bound of the ratio for negative advantages (off by default); dppo: largest ratio (20)",
        above=1,
        argument="clip_dual",
        aliases=("dual_clip", "clip_ratio_c"),
    )


@dataclass(frozen=True)
class PolicyInputs:
    """Validated inputs of a policy loss: [B, T], one dtype, 0 outside the mask; only log_probs has a gradient."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    rollout_weights: Tensor | None

    @property
    def log_ratio(self) -> Tensor:
        """log_probs - old_log_probs."""
        return self.log_probs - self.old_log_probs

    @property
    def bounded_log_ratio(self) -> Tensor:
        """The log-ratio clamped to +-20, so that its exponential stays finite."""
        return self.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def aggregate(self, loss: Tensor, mode: str, options: Mapping[str, Any]) -> Tensor:
        """Weight a per-token loss by the rollout correction and reduce it; `options` are the loss's extra arguments."""
        if self.rollout_weights is not None:
            loss = loss * self.rollout_weights
        chosen = {name: options[name] for name in _AGGREGATION_OPTIONS if name in options}
        return aggregate_loss(loss, self.mask, mode, **chosen)

    def fraction(self, condition: Tensor) -> Tensor:
        """Fraction of valid tokens that meet a condition."""
        return count_valid(condition & self.mask).to(self.log_probs.dtype) / self.num_valid

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the valid tokens, detached; values must be 0 outside the mask."""
        return values.detach().sum() / self.num_valid

    def row_mean(self, values: Tensor) -> Tensor:
        """Mean over the valid tokens of each row, [B, T] -> [B]; values must be 0 outside the mask."""
        return values.sum(-1) / (count_valid_per_row(self.mask).to(values.dtype) + EPSILON)

    def mean_over_rows(self, row_loss: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Mean of the losses [B] of rows, each times the geometric mean of its `rollout_weights`.

        It is over the rows of all ranks if `options` has `num_sequences`, of this call otherwise.
        """
        if self.rollout_weights is not None:
            log_weights = (self.rollout_weights + _WEIGHT_FLOOR).log()
            row_loss = row_loss * self.row_mean(log_weights.masked_fill(~self.mask, 0.0)).exp()
        row = torch.ones((len(row_loss), 1), dtype=torch.bool, device=row_loss.device)
        counts = {name: options[name] for name in ("num_sequences", "dp_size") if name in options}
        return aggregate_loss(row_loss.unsqueeze(-1), row, "seq-mean-token-sum", **counts)

    @property
    def num_valid(self) -> Tensor:
        """Number of valid tokens plus epsilon, safe to divide by."""
        return count_valid(self.mask).to(self.log_probs.dtype) + EPSILON

    def metrics(
        self, log_ratio: Tensor, clipped: Tensor | None = None, clipped_lower: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The metrics every loss reports; a fraction is 0 if its condition is None."""
        zero = torch.zeros((), dtype=self.log_probs.dtype, device=self.log_probs.device)
        return {
            "pg_clipfrac": zero if clipped is None else self.fraction(clipped),
            "pg_clipfrac_lower": zero if clipped_lower is None else self.fraction(clipped_lower),
            "ppo_kl": self.mean(-log_ratio),
        }


def prepare(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, rollout_weights: Tensor | None
) -> PolicyInputs:
    """Validate the inputs of a policy loss and zero them outside the mask.

    Raises:
        ValueError: shapes differ or are not [B, T], or the mask is not bool.
    """
    check_matrix(response_mask)
    check_same_shape(
        response_mask,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        rollout_weights=rollout_weights,
    )
    dtype = working_dtype(log_probs, old_log_probs, advantages)

    def constant(tensor: Tensor) -> Tensor:
        return clean(tensor.detach(), response_mask, dtype)

    return PolicyInputs(
        log_probs=clean(log_probs, response_mask, dtype),
        old_log_probs=constant(old_log_probs),
        advantages=constant(advantages),
        mask=response_mask,
        rollout_weights=None if rollout_weights is None else constant(rollout_weights),
    )


def check_clip(clip_low: float, clip_high: float) -> None:
    """Require 0 <= clip_low <= clip_high.

    Raises:
        ValueError: a bound is negative or NaN, or clip_low exceeds clip_high.
    """
    check_number("clip_low", clip_low, low=0.0)
    check_number("clip_high", clip_high, low=0.0)
    if clip_low > clip_high:
        raise ValueError(f"clip_low must not exceed clip_high, got {clip_low} > {clip_high}; were they swapped?")

"""Rollout correction of training rows: mismatch metrics, importance weights, rejection.

Log-ratios are taken per column of `--log_prob_level`, as in the policy loss; a "sequence" is one decision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlvla.algorithms.columns import Columns
from rlvla.algorithms.rollout_correction import (
    interpolated_log_probs,
    mismatch_metrics,
    rejection_mask,
    rollout_correction_weights,
)
from rlvla.experience import Experience
from rlvla.trainer.algorithm_config import CorrectionConfig
from rlvla.trainer.metrics import Metrics
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

PREFIX = "rollout_corr"


def correct_rollout(
    rows: Experience, config: CorrectionConfig, columns: Columns, metrics: Metrics, strategy: DeepspeedStrategy
) -> Experience:
    """Add `rollout_weights` and remove rejected entries from `policy_mask`; the mismatch is always measured.

    Args:
        rows: rows with `old_log_probs`, `rollout_log_probs` and `policy_mask`.
        config: importance weights and rejection.
        columns: columns of the log-prob level.
        metrics: receives the metrics rollout_corr/*.
        strategy: gives the ranks over which --rollout_is_batch_normalize averages.
    """
    _measure_mismatch(rows, metrics)
    weights = column_weights(rows, config, columns, strategy, metrics)
    if config.rollout_rs != "none":
        old, rollout, mask = _columns(rows, columns)
        kept, measured = rejection_mask(
            old,
            rollout,
            mask,
            statistic=config.rollout_rs,
            level=config.rollout_rs_level,
            high=config.rollout_rs_high,
            low=config.rollout_rs_low,
        )
        count, num_rows = float(mask.sum()), float(mask.any(-1).sum())
        for name in ("rollout_rs_mean", "rollout_rs_masked_fraction"):
            metrics.mean({f"{PREFIX}/{name}": measured[name]}, count)
        metrics.mean({f"{PREFIX}/rollout_rs_seq_masked_fraction": measured["rollout_rs_seq_masked_fraction"]}, num_rows)
        metrics.maximum({f"{PREFIX}/rollout_rs_max": measured["rollout_rs_max"]})
        rows = rows.with_fields(policy_mask=rows.policy_mask & columns.spread(kept))
    return rows if weights is None else rows.with_fields(rollout_weights=columns.spread(weights))


@dataclass(frozen=True)
class Interpolation:
    """Old log-probs interpolated between rollout and training, without a forward pass before the update.

    Attributes:
        correction: the importance weights.
    """

    correction: CorrectionConfig

    def __call__(
        self, new: Tensor, behaviour: Tensor, staleness: Tensor, mask: Tensor, metrics: Metrics
    ) -> tuple[Tensor, Tensor | None]:
        """Old log-probs [B, L], and their importance weights to the policy that sampled, if they are on.

        Args:
            new: [B, L] of the policy in training.
            behaviour: [B, L] at sampling time.
            staleness: [B] versions.
            mask: [B, L] bool.
            metrics: receives rollout_corr/ess and metrics of the weights.
        """
        old = interpolated_log_probs(behaviour, new, staleness)
        _effective_share((old - behaviour).clamp(-20.0, 20.0).exp(), mask, f"{PREFIX}/ess", metrics)
        config = self.correction
        if not config.weighs:
            return old, None
        weights, measured = rollout_correction_weights(
            old,
            behaviour,
            mask,
            level=config.rollout_is_level,
            mode=config.rollout_is,
            low=config.rollout_is_low,
            high=config.rollout_is_high,
        )
        names = ("mean", "fraction_low", "fraction_high")
        metrics.mean({f"{PREFIX}/rollout_is_{n}": measured[f"rollout_is_{n}"] for n in names}, float(mask.sum()))
        return old, weights


def column_weights(
    rows: Experience,
    config: CorrectionConfig,
    columns: Columns,
    strategy: DeepspeedStrategy,
    metrics: Metrics | None = None,
) -> Tensor | None:
    """Importance weights [B, L] of the columns; None if they are off."""
    if not config.weighs:
        return None
    old, rollout, mask = _columns(rows, columns)
    device = strategy.device  # collective operations need tensors on the accelerator
    weights, measured = rollout_correction_weights(
        old.to(device),
        rollout.to(device),
        mask.to(device),
        level=config.rollout_is_level,
        mode=config.rollout_is,
        low=config.rollout_is_low,
        high=config.rollout_is_high,
        batch_normalize=config.rollout_is_batch_normalize,
        process_group="world" if strategy.world_size > 1 else None,
    )
    weights = weights.cpu()
    if metrics is not None:
        count = float(mask.sum())
        for name in ("mean", "fraction_low", "fraction_high", "batch_norm_factor"):
            if f"rollout_is_{name}" in measured:
                metrics.mean({f"{PREFIX}/rollout_is_{name}": measured[f"rollout_is_{name}"]}, count)
        metrics.minimum({f"{PREFIX}/rollout_is_min": measured["rollout_is_min"]})
        metrics.maximum({f"{PREFIX}/rollout_is_max": measured["rollout_is_max"]})
        _effective_share(weights, mask, f"{PREFIX}/rollout_is_ess", metrics)
    return weights


def _columns(rows: Experience, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    mask = rows.policy_mask
    old, rollout = (columns.sum(x, mask) for x in (rows.old_log_probs, rows.rollout_log_probs))
    return old, rollout, columns.any(mask)


def _measure_mismatch(rows: Experience, metrics: Metrics) -> None:
    mask = rows.policy_mask
    measured = mismatch_metrics(rows.old_log_probs, rows.rollout_log_probs, mask)
    means = {f"{PREFIX}/{name}": measured[name] for name in ("probs_diff_mean", "kl", "k3_kl")}
    metrics.mean(means, float(mask.sum()))
    metrics.maximum({f"{PREFIX}/probs_diff_max": measured["probs_diff_max"]})
    _deviation((rows.old_log_probs.double().exp() - rows.rollout_log_probs.double().exp()).abs()[mask], metrics)
    weights = (rows.old_log_probs - rows.rollout_log_probs).clamp(-20.0, 20.0).exp()
    _effective_share(weights, mask, f"{PREFIX}/ess", metrics)


def _deviation(differences: Tensor, metrics: Metrics) -> None:
    """Standard deviation (ddof 0) of the probability differences [N] float64 over all ranks."""
    mean, square = f"_{PREFIX}/probs_diff_first", f"_{PREFIX}/probs_diff_second"
    some = len(differences) > 0
    moments = {mean: differences.mean() if some else 0.0, square: differences.square().mean() if some else 0.0}
    metrics.mean(moments, len(differences))
    metrics.derived(f"{PREFIX}/probs_diff_std", lambda reduced: max(0.0, reduced[square] - reduced[mean] ** 2) ** 0.5)


def _effective_share(weights: Tensor, mask: Tensor, name: str, metrics: Metrics) -> None:
    """Effective sample size over all ranks as a fraction of the valid entries: mean(w)^2 / mean(w^2)."""
    valid = weights[mask].double()
    some = len(valid) > 0
    ingredients = {
        f"_{name}/first": valid.mean() if some else torch.zeros(()),
        f"_{name}/second": valid.square().mean() if some else torch.zeros(()),
    }
    metrics.mean(ingredients, len(valid))
    metrics.derived(
        name,
        lambda reduced: (
            reduced[f"_{name}/first"] ** 2 / reduced[f"_{name}/second"] if reduced[f"_{name}/second"] else 0.0
        ),
    )

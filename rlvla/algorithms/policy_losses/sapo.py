"""Soft adaptive policy optimization (SAPO): a soft gate in place of clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.lazy import torch
from rlvla.algorithms.policy_losses.common import prepare
from rlvla.algorithms.policy_losses.registry import register_policy_loss
from rlvla.options import Options, arg

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SAPOOptions(Options):
    """Temperatures of the gate."""

    tau_pos: float = arg(1.0, "steepness of the gate for positive advantages", above=0)
    tau_neg: float = arg(1.05, "steepness of the gate for the other advantages", above=0)


@register_policy_loss("sapo", options=SAPOOptions)
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    rollout_weights: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Soft gating instead of clipping (SAPO, Gao et al. 2025).

    -A sigmoid(tau (rho - 1)) 4 / tau, with tau_pos where A > 0 and tau_neg elsewhere, and the log-ratio clamped to
    +-20. Always aggregated as seq-mean-token-mean; `agg_mode` is ignored.

    Args:
        tau_pos: temperature for positive advantages, above 0.
        tau_neg: temperature for the others, above 0; larger values dampen them more.
    """
    if not tau_pos > 0 or not tau_neg > 0:
        raise ValueError(f"tau_pos and tau_neg must be positive, got {tau_pos} and {tau_neg}")
    inputs = prepare(log_probs, old_log_probs, advantages, response_mask, rollout_weights)
    log_ratio = inputs.bounded_log_ratio
    tau = torch.full_like(inputs.advantages, tau_neg).masked_fill_(inputs.advantages > 0, tau_pos)
    loss = -inputs.advantages * torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    return inputs.aggregate(loss, "seq-mean-token-mean", extra), inputs.metrics(log_ratio)

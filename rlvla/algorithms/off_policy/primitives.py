"""Action primitives: a choice among n, each with up to D parameters (MAPLE, Nasiriany et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlvla.algorithms.checks import check_mask, check_shape, working_dtype

LOGIT_BOUND = 10.0


def primitive_log_probs(logits: Tensor) -> Tensor:
    """Log-probabilities [..., n] of the primitives from logits [..., n].

    Logits are clamped to +-10, so that none is given up for good. float64 if they are, float32 otherwise.
    """
    return logits.to(working_dtype(logits)).clamp(-LOGIT_BOUND, LOGIT_BOUND).log_softmax(-1)


def over_primitives(log_probs: Tensor, values: Tensor) -> Tensor:
    """Expected value under the choice of primitive, sum_k pi_k values_k.

    Args:
        log_probs: [..., n], log pi_k, finite.
        values: broadcastable to log_probs; -log_probs gives the entropy of the choice.

    Returns:
        [...].
    """
    return (log_probs.exp() * values).sum(-1)


def parameter_mask(sizes: Sequence[int], width: int | None = None) -> Tensor:
    """Which parameters each primitive uses: its first ones.

    Args:
        sizes: n numbers of parameters; 0 is allowed.
        width: D, by default the largest of `sizes`.

    Returns:
        [n, D] bool.

    Raises:
        ValueError: no primitive, or a size outside 0..D.
    """
    if not sizes:
        raise ValueError("there are no primitives: sizes is empty")
    width = max(sizes) if width is None else width
    if min(sizes) < 0 or max(sizes) > width:
        raise ValueError(f"sizes {list(sizes)} must lie in 0..{width}, the number of parameter dimensions")
    return torch.arange(width) < torch.tensor(sizes).unsqueeze(-1)


def critic_actions(primitives: Tensor, parameters: Tensor, mask: Tensor) -> Tensor:
    """Action as a critic reads it: one-hot primitive, then its parameters, unused ones 0.

    Args:
        primitives: [...] int64 in 0..n-1; `torch.arange(n).expand(B, n)` for all primitives of B rows.
        parameters: [..., D].
        mask: [n, D] bool, see `parameter_mask`.

    Returns:
        [..., n + D]; unused parameters receive no gradient, and NaN in them has no effect.

    Raises:
        ValueError: shapes that do not fit, or a mask that is not bool.
    """
    check_mask(mask, "mask")
    check_shape("parameters", parameters, (*primitives.shape, mask.shape[-1]))
    one_hot = torch.nn.functional.one_hot(primitives, len(mask)).to(parameters.dtype)
    return torch.cat([one_hot, parameters.masked_fill(~mask[primitives], 0.0)], -1)

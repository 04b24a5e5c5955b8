"""Whether a policy's proprioception fits the dataset statistics it is normalized with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlvla.experience import Sample

# About 2 % of the values lie outside the 1 % and 99 % quantiles of the statistics; half of them suggest another robot.
FOREIGN_SHARE = 0.5


def saturated_share(normalized: Tensor) -> float:
    """Share of the entries of normalized proprioception [B, P] at or beyond +-1, over the dimensions that vary."""
    varying = normalized[:, normalized.amax(0) > normalized.amin(0)] if len(normalized) > 1 else normalized
    return float((varying.abs() >= 1.0).float().mean()) if varying.numel() else 0.0


def saturated_proprio(samples: Sequence[Sample]) -> float:
    """`saturated_share` of episodes; 0 if the policy reads no proprioception, or there are none."""
    seen = [sample.proprio for sample in samples if sample.proprio is not None]
    if not seen:
        return 0.0
    state_width = samples[0].state_width  # a one-hot vector is always saturated
    return saturated_share(torch.cat([proprio[:, : proprio.shape[1] - state_width] for proprio in seen]))


def foreign_proprio(share: float) -> str | None:
    """What to say of this `saturated_share`; None if it suits the statistics."""
    if share <= FOREIGN_SHARE:
        return None
    return (
        f"{100 * share:.0f} % of the proprioception lies at or outside of the range in the policy's dataset "
        "statistics: they belong to another robot or another convention. Look at --unnorm_key and at how the "
        "demonstrations recorded proprio"
    )

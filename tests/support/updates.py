"""Rows of training and the optimizer of tests of updates."""

from __future__ import annotations

import torch

from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.utils.deepspeed.engine import OptimConfig

A, D, T = 4, 2, 8

OPTIM = OptimConfig(0.1, (0.9, 0.999), 0.0, "constant", 0.0, 10)


def batch(actor: Actor, n: int = 7) -> Experience:
    """Rows with ragged masks, one of them empty."""
    generator = torch.Generator().manual_seed(0)
    executed = torch.tensor([4, 4, 1, 3, 0, 2, 4])[:n]
    mask = torch.arange(T)[None] // D < executed[:, None]
    rows = Experience(
        images=torch.randint(0, 256, (n, 1, 64, 64, 3), dtype=torch.uint8, generator=generator),
        proprio=torch.rand(n, 2, generator=generator),
        instructions=["reach the red disc"] * 3 + ["reach the yellow disc"] * (n - 3),
        episode_index=torch.arange(n),
        trace={"tokens": torch.randint(0, 256, (n, T), generator=generator)},
        action_mask=mask,
        policy_mask=mask & (torch.arange(T) != 2),  # one token that cannot change the action
        value_mask=mask & (torch.arange(T) % D == 0),
        advantages=torch.randn(n, A, generator=generator).repeat_interleave(D, dim=1),
        returns=torch.randn(n, T, generator=generator),
        values=torch.randn(n, T, generator=generator),
    )
    with torch.no_grad():
        old = actor(**actor.score(rows, 1.0))["log_probs"]
    return rows.with_fields(old_log_probs=old, rollout_log_probs=old, ref_log_probs=old - 0.1)

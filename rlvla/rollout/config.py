"""Flags of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.utils.arguments import arg


@dataclass(frozen=True)
class RolloutConfig:
    """How episodes are batched for the policy, and what happens to those whose environment fails."""

    rollout_max_batch: int | None = arg(
        None,
        "episodes per forward pass of the policy at most (default: --num_envs; half of them do not wait for more, so "
        "that one half simulates while the other is answered)",
        minimum=1,
    )
    rollout_max_wait_ms: float = arg(
        20.0, "milliseconds for which a smaller batch waits for more episodes, while others simulate", minimum=0
    )
    deterministic_rollout: bool = arg(
        False,
        "the policy waits for all running episodes and answers them together, in their order: log-probs are then the "
        "same to the bit whatever the timing of the workers; simulation and inference no longer overlap",
    )
    max_env_retries: int = arg(
        2, "how often an episode is played again from its initial state after its environment failed", minimum=0
    )
    max_dropped_fraction: float = arg(
        0.05,
        "stop when more than this share of a rollout's episodes had to be dropped (they are counted, never scored)",
        minimum=0,
        maximum=1,
    )

"""Flags of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.utils.cli.flags import arg


@dataclass(frozen=True)
class RolloutConfig:
    """Batching of episodes for the policy, and handling of environment failures."""

    rollout_max_batch: int | None = arg(
        None,
        "maximum episodes per forward pass of the policy (default: --num_envs; a batch of half that size does "
        "not wait, so that one half simulates while the policy answers the other)",
        minimum=1,
    )
    rollout_max_wait_ms: float = arg(
        20.0, "milliseconds a smaller batch waits for more episodes while others simulate", minimum=0, maximum=60_000
    )
    deterministic_rollout: bool = arg(
        False,
        "the policy waits for all running episodes and answers them in a fixed order: log-probs are then bitwise "
        "reproducible regardless of worker timing, but simulation and inference no longer overlap",
    )
    max_env_retries: int = arg(
        2, "how often an episode is retried from its initial state after its environment failed", minimum=0, maximum=100
    )
    max_dropped_fraction: float = arg(
        0.05,
        "stop if more than this fraction of a rollout's episodes is dropped (they are counted, never scored)",
        minimum=0,
        maximum=1,
    )

"""Statistics of a rollout: timing, failures, and saturation of the normalized proprioception."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlvla.envs.workers.pool import FAULT_KINDS, EnvWorkerError
from rlvla.experience import Sample
from rlvla.rollout.episode import EpisodeRequest, FinishedEpisode
from rlvla.utils.errors import RunEnded

OF_TASKS = "rollout_tasks/"  # prefix of a task's name in multi-task runs: its success at end
SUMMED = (
    "rollout/env_steps",
    "rollout/env_steps_per_s",
    "rollout/env_retries",
    "rollout/dropped",
    *(f"rollout/env_faults_{kind}" for kind in FAULT_KINDS),
)
# About 2 % of the values lie outside the 1 % and 99 % quantiles of the statistics; half of them suggest another robot.
MAX_SATURATION = 0.5


@dataclass(frozen=True)
class DroppedEpisode:
    """A dropped episode: its request and its last failure."""

    request: EpisodeRequest
    error: EnvWorkerError


@dataclass
class RolloutStats:
    """Timing, batch sizes and failures of a rollout.

    Attributes:
        wall_s: seconds from the first command to the last answer.
        policy_s: seconds spent in the policy.
        waiting_s: seconds spent waiting for the workers.
        rewards_s: seconds spent waiting for late rewards.
        env_busy_s: seconds from command to answer, summed over all slots.
        building_s: the part of `env_busy_s` in which environments were built.
        policy_calls: number of forward passes.
        decisions: number of decisions of the policy.
        env_steps: environment steps of the finished episodes.
        episodes: finished episodes.
        retries: failed attempts that were repeated, including episodes lost with another one of the same worker.
        dropped: episodes given up.
        failed: episodes for which the policy had no actions, see `Decision.failures`.
        faults: failed attempts by kind, see `FAULT_KINDS`.
    """

    wall_s: float = 0.0
    policy_s: float = 0.0
    waiting_s: float = 0.0
    env_busy_s: float = 0.0
    building_s: float = 0.0
    rewards_s: float = 0.0
    policy_calls: int = 0
    decisions: int = 0
    env_steps: int = 0
    episodes: int = 0
    retries: int = 0
    dropped: list[DroppedEpisode] = field(default_factory=list)
    failed: list[FinishedEpisode] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    def as_metrics(self) -> dict[str, float]:
        """Metrics by TensorBoard name; those in `SUMMED` are summed over ranks, the others averaged."""
        return {
            "timing_s/rollout": self.wall_s,
            "timing_s/rollout_policy": self.policy_s,
            "timing_s/rollout_waiting": self.waiting_s,
            "timing_s/rewards": self.rewards_s,
            "rollout/policy_batch": self.decisions / max(1, self.policy_calls),
            "rollout/env_steps": float(self.env_steps),
            "rollout/env_steps_per_s": self.env_steps / max(1e-9, self.wall_s),
            "rollout/env_retries": float(self.retries),
            "rollout/dropped": float(len(self.dropped)),
            **{f"rollout/env_faults_{kind}": float(self.faults[kind]) for kind in FAULT_KINDS},
        }


class TooManyDroppedError(RunEnded):
    """More episodes had to be dropped than `max_dropped_fraction` allows.

    Args:
        dropped: episodes dropped so far.
        total: episodes of the rollout.
        limit: allowed fraction.
    """

    def __init__(self, dropped: list[DroppedEpisode], total: int, limit: float):
        self.dropped = dropped
        kinds = Counter(f"{d.error.phase}: {d.error.error_type or 'the process ended or hung'}" for d in dropped)
        tasks = Counter(f"{d.request.suite} task {d.request.task_id}" for d in dropped)
        phases, by_task = (
            ", ".join(f"{name} ({count})" for name, count in counts.most_common(5)) for counts in (kinds, tasks)
        )
        super().__init__(
            f"{len(dropped)} of {total} episodes were dropped because their environment kept failing, more than "
            f"--max_dropped_fraction {limit:g} allows. By phase: {phases}. By task: {by_task}. "
            "If they ran out of time, raise the --env_..._timeout of that phase; if of memory, start fewer workers "
            f"(--num_envs). The last failure was:\n{dropped[-1].error}"
        )


def saturated_fraction(normalized: Tensor, limit: float = 1.0) -> float:
    """Fraction of normalized proprioception [B, P] at or beyond +-`limit`, over the dimensions that vary."""
    varying = normalized[:, normalized.amax(0) > normalized.amin(0)] if len(normalized) > 1 else normalized
    return float((varying.abs() >= limit).float().mean()) if varying.numel() else 0.0


def saturated_proprio(samples: Sequence[Sample], limit: float = 1.0) -> float:
    """`saturated_fraction` of episodes; 0 without episodes, or if the policy reads no proprioception.

    Args:
        samples: the episodes.
        limit: see `PolicySpec.proprio_limit`.
    """
    proprio = [sample.proprio for sample in samples if sample.proprio is not None]
    if not proprio:
        return 0.0
    state_width = samples[0].state_width  # a one-hot vector is always saturated
    return saturated_fraction(torch.cat([states[:, : states.shape[1] - state_width] for states in proprio]), limit)


def saturation_warning(fraction: float) -> str | None:
    """Warning about a `saturated_fraction` beyond `MAX_SATURATION`, else None."""
    if fraction <= MAX_SATURATION:
        return None
    return (
        f"{100 * fraction:.0f} % of the proprioception lies at or outside of the range in the policy's dataset "
        "statistics: they belong to another robot or another convention. Look at --unnorm_key and at how the "
        "demonstrations recorded proprio"
    )

"""Timing and failure statistics of a rollout."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlvla.envs.workers.pool import FAULT_KINDS, EnvWorkerError
from rlvla.rollout.episode import EpisodeRequest
from rlvla.utils.errors import RunEnded

OF_TASKS = "rollout_tasks/"  # before the name of a task, of several: success at end of its episodes
SUMMED = (
    "rollout/env_steps",
    "rollout/env_steps_per_s",
    "rollout/env_retries",
    "rollout/dropped",
    *(f"rollout/env_faults_{kind}" for kind in FAULT_KINDS),
)


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
        building_s: those of them in which environments were built.
        policy_calls: number of forward passes.
        decisions: number of decisions of the policy.
        env_steps: environment steps of the finished episodes.
        episodes: finished episodes.
        retries: attempts that failed and were repeated, also those lost with another episode of the same worker.
        dropped: episodes given up.
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
        super().__init__(
            f"{len(dropped)} of {total} episodes were dropped because their environment kept failing, more than "
            f"--max_dropped_fraction {limit:g} allows. By phase: {_listed(kinds)}. By task: {_listed(tasks)}. "
            "If they ran out of time, raise the --env_..._timeout of that phase; if of memory, start fewer workers "
            f"(--num_envs). The last failure was:\n{dropped[-1].error}"
        )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common(5))

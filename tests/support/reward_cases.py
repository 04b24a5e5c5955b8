"""What tests of reward sources share: chunks, episodes, tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.experience import Sample
from rlvla.rewards import EpisodeRewards, EpisodeStart, RewardPlan


def make_task(name: str = "Stack", propositions: Sequence[str] = (), control_freq: float = 20.0) -> TaskSpec:
    """A task with the name and the machine of one of robosuite's, or with none."""
    machine = {"Lift": "lift", "Stack": "stack"}.get(name)
    return TaskSpec("robosuite", 0, name, "do it", 100, 10, 7, 0, control_freq, tuple(propositions), machine=machine)


def make_observation(value: int = 0) -> Observation:
    return Observation(np.full((1, 4, 4, 3), value, np.uint8), None, "do it")


def make_chunk(
    events: Sequence[set[str]],
    size: int | None = None,
    *,
    successes: Sequence[bool] | None = None,
    terminated: bool = False,
    truncated: bool = False,
    value: int = 0,
) -> ChunkResult:
    """A chunk of `size` actions of which `len(events)` were executed."""
    n = len(events)
    size = n if size is None else size
    successes = [False] * n if successes is None else list(successes)
    return ChunkResult(
        observation=make_observation(value),
        steps_executed=n,
        rewards=np.zeros(size, np.float32),
        successes=np.array(successes + [False] * (size - n)),
        terminated=terminated,
        truncated=truncated,
        success_at_end=terminated,
        events=[frozenset(e) for e in events],
    )


def make_sample(components: dict[str, np.ndarray], executed: Sequence[int], **fields: Any) -> Sample:
    """A finished episode with those components [S, A], two log-probs per action, and nothing else of interest."""
    grids = {name: torch.from_numpy(np.asarray(grid, dtype=np.float32)) for name, grid in components.items()}
    decisions, chunk = next(iter(grids.values())).shape
    values = {
        "images": torch.zeros(decisions, 1, 4, 4, 3, dtype=torch.uint8),
        "proprio": None,
        "instruction": "do it",
        "actions": torch.zeros(decisions, chunk, 2),
        "executed": torch.arange(chunk)[None] < torch.tensor(executed)[:, None],
        "trace": {"tokens": torch.zeros(decisions, 2 * chunk, dtype=torch.int64)},
        "log_probs": torch.zeros(decisions, 2 * chunk),
        "rewards": sum(grids.values(), torch.zeros(())),
        "reward_components": grids,
        "finish_step": sum(executed),
        "success_once": False,
        "success_at_end": False,
        "terminated": False,
        "truncated": True,
        "last_images": torch.zeros(1, 4, 4, 3, dtype=torch.uint8),
        "last_proprio": None,
        "uid": "g",
        "suite": "toy_reach",
        "task_id": 0,
        "init_state_id": 0,
        "seed": 0,
    }
    return Sample(**{**values, **fields})


def play(plan: RewardPlan, task: TaskSpec, chunks: Sequence[ChunkResult]) -> tuple[Sample, EpisodeRewards]:
    """An episode as the rollout engine plays it: score the chunks, end, submit the sample, collect, finish, release.

    The last chunk says how it ended; where it says neither, the episode was truncated for want of progress.
    """
    rewards = plan.begin(task, EpisodeStart(make_observation()))
    for chunk in chunks:
        rewards.look(chunk)
        rewards.score_chunk(chunk)
    terminated = chunks[-1].terminated or rewards.failed
    rewards.end(terminated=terminated, truncated=not terminated)
    executed = [chunk.steps_executed for chunk in chunks]
    plan.submit(make_sample(rewards.so_far().components, executed))
    paid = rewards.finalize_rewards(plan.collect(1)[0])
    rewards.release()
    return make_sample(paid.components, executed, reward_info=paid.info), rewards

"""`sleeping_reach`: toy_reach in which every chunk takes time and no CPU, as on a simulator host or a GPU of its own.

The mean milliseconds per action are read from SLEEPING_REACH_MS, the spread of their logarithm from
SLEEPING_REACH_SIGMA (0: always the same).
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np

from rlvla.envs.base import ChunkResult, TaskSpec
from rlvla.envs.registry import get_suite, list_tasks, make_env, register_suite

_SECONDS = float(os.environ.get("SLEEPING_REACH_MS", "0")) / 1000
_SIGMA = float(os.environ.get("SLEEPING_REACH_SIGMA", "0"))


class SleepingReach:
    """Passes everything on to toy_reach."""

    def __init__(self, env: Any, task: TaskSpec):
        self.task, self._env, self._rng = task, env, np.random.default_rng()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Sleep as long as the actions take, then execute them."""
        factor = float(np.exp(self._rng.normal(-(_SIGMA**2) / 2, _SIGMA))) if _SIGMA else 1.0
        time.sleep(_SECONDS * len(actions) * factor)
        return self._env.step_chunk(actions, record_frames=record_frames)


def _list_tasks(**options: Any) -> list[TaskSpec]:
    return [replace(task, suite="sleeping_reach") for task in list_tasks("toy_reach", **options)]


def _make(task_id: int, **options: Any) -> SleepingReach:
    return SleepingReach(make_env("toy_reach", task_id, **options), _list_tasks(**options)[task_id])


register_suite("sleeping_reach", replace(get_suite("toy_reach"), list_tasks=_list_tasks, make=_make))

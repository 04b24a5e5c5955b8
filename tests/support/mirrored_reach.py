"""A suite of two tasks for tests: `toy_reach` in which right is left, and the same with a shorter limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.envs.registry import Suite, list_tasks, register_suite
from rlvla.envs.toy_reach.env import CAMERAS, ToyReachEnv


class MirroredReachEnv(ToyReachEnv):
    """Executes the first dimension of every action with the other sign."""

    def step_chunk(self, actions, *, record_frames=False):
        return super().step_chunk(actions * np.array([-1, 1], np.float32), record_frames=record_frames)


def _list_tasks(
    *, cameras: Sequence[str] = CAMERAS, image_size: int = 64, use_proprio: bool = False, max_steps: int = 12
) -> list[TaskSpec]:
    (task,) = list_tasks(
        "toy_reach", cameras=cameras, image_size=image_size, use_proprio=use_proprio, max_steps=max_steps
    )
    first = replace(task, suite="mirrored_reach", name="mirrored")
    return [first, replace(first, task_id=1, name="mirrored_short", max_steps=max(1, max_steps // 2))]


def _make(
    task_id: int,
    *,
    cameras: Sequence[str] = CAMERAS,
    image_size: int = 64,
    use_proprio: bool = False,
    max_steps: int = 12,
) -> MirroredReachEnv:
    task = _list_tasks(cameras=cameras, image_size=image_size, use_proprio=use_proprio, max_steps=max_steps)[task_id]
    return MirroredReachEnv(task, image_size=image_size, use_proprio=use_proprio)


register_suite("mirrored_reach", Suite(list_tasks=_list_tasks, make=_make, cameras=CAMERAS))

"""A suite for tests: `toy_reach` of which no episode can be played on some ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from rlvla.envs.base import TaskSpec
from rlvla.envs.registry import Suite, list_tasks, register_suite
from rlvla.envs.toy_reach.env import CAMERAS, ToyReachEnv

FAILING_RANKS = "FAILING_REACH_RANKS"  # environment variable: their numbers


class FailingReachEnv(ToyReachEnv):
    """Can be reset, and not stepped on some ranks."""

    def step_chunk(self, actions, *, record_frames=False):
        if os.environ["RANK"] in os.environ[FAILING_RANKS].split():
            raise RuntimeError("this rank's simulator is broken")
        return super().step_chunk(actions, record_frames=record_frames)


def _list_tasks(
    *, cameras: Sequence[str] = CAMERAS, image_size: int = 64, use_proprio: bool = False, max_steps: int = 12
) -> list[TaskSpec]:
    kwargs = {"cameras": cameras, "image_size": image_size, "use_proprio": use_proprio, "max_steps": max_steps}
    return [replace(task, suite="failing_reach") for task in list_tasks("toy_reach", **kwargs)]


def _make(
    task_id: int,
    *,
    cameras: Sequence[str] = CAMERAS,
    image_size: int = 64,
    use_proprio: bool = False,
    max_steps: int = 12,
) -> FailingReachEnv:
    task = _list_tasks(cameras=cameras, image_size=image_size, use_proprio=use_proprio, max_steps=max_steps)[task_id]
    return FailingReachEnv(task, image_size=image_size, use_proprio=use_proprio)


register_suite("failing_reach", Suite(list_tasks=_list_tasks, make=_make, cameras=CAMERAS))

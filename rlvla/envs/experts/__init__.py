"""Scripted experts: where demonstrations come from when there is no data set."""

from __future__ import annotations

from rlvla.envs.experts.base import Expert, ExpertConfig
from rlvla.envs.registry import get_suite, list_tasks
from rlvla.utils.errors import ConfigError

__all__ = ["Expert", "ExpertConfig", "make_expert"]


def make_expert(suite: str, task_id: int, config: ExpertConfig) -> Expert:
    """The scripted expert for a task.

    Raises:
        ConfigError: unknown suite or task, a task without an expert, or a setting that has no meaning for it.
    """
    expert = get_suite(suite).expert
    tasks = {task.task_id: task for task in list_tasks(suite)}
    if task_id not in tasks:
        raise ConfigError(f"{suite} has no task {task_id}; known tasks: {', '.join(map(str, tasks))}")
    if expert is None:
        raise ConfigError(
            f"suite '{suite}' has no scripted expert; train on recorded demonstrations, or register one with "
            "Suite(expert=...)"
        )
    return expert(tasks[task_id], config)

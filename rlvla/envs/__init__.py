"""Environments: interfaces, suites and worker processes. Never imports torch."""

from rlvla.envs.base import ChunkResult, Env, Observation, TaskSpec
from rlvla.envs.registry import Suite, get_suite, list_tasks, make_env, register_suite, suite_names

__all__ = [
    "ChunkResult",
    "Env",
    "Observation",
    "Suite",
    "TaskSpec",
    "get_suite",
    "list_tasks",
    "make_env",
    "register_suite",
    "suite_names",
]

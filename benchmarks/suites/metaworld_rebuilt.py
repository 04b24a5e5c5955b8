"""Meta-World whose workers keep one environment; for benchmarks/task_switches.py."""

import dataclasses

from rlvla.envs.registry import get_suite, register_suite

register_suite("metaworld", dataclasses.replace(get_suite("metaworld"), kept=0))

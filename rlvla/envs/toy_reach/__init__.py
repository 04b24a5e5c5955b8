"""toy_reach: reach the disc of the named color. Needs no simulator; for first steps, debugging and CI."""

from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.toy_reach.batched import make_batched
from rlvla.envs.toy_reach.env import CAMERAS, ToyReachOptions, list_tasks, make
from rlvla.envs.toy_reach.expert import ToyReachExpert

register_suite(
    "toy_reach",
    Suite(
        list_tasks=list_tasks,
        make=make,
        cameras=CAMERAS,
        options=ToyReachOptions,
        expert=lambda task, config: ToyReachExpert(config),
        make_batched=make_batched,
    ),
)

"""toy_push: push the named disc into the named zone. Needs no simulator; harder than toy_reach."""

from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.toy_push.batched import make_batched
from rlvla.envs.toy_push.env import CAMERAS, ToyPushOptions, list_tasks, make
from rlvla.envs.toy_push.expert import ToyPushExpert

register_suite(
    "toy_push",
    Suite(
        list_tasks=list_tasks,
        make=make,
        cameras=CAMERAS,
        options=ToyPushOptions,
        expert=lambda task, config: ToyPushExpert(config),
        make_batched=make_batched,
    ),
)

"""The RoboTwin suite and an adapter for single-step simulators. Registering it imports no simulator."""

from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.robotwin.env import CAMERAS, IMAGE_SIZE, SUITE, RobotwinOptions, list_tasks, make
from rlvla.envs.robotwin.expert import PlannerExpert

register_suite(
    SUITE,
    Suite(
        list_tasks=list_tasks,
        make=make,
        cameras=CAMERAS,
        options=RobotwinOptions,
        image_size=IMAGE_SIZE,
        env_mb=lambda options: 700,  # the first of a process, with the assets of `stand_in`
        expert=PlannerExpert,
    ),
)

"""The five LIBERO suites, and those of LIBERO-PRO. Registering them imports neither LIBERO nor robosuite."""

from functools import partial

from rlvla.envs.libero.env import CAMERAS, IMAGE_SIZE, MAX_STEPS, PRO_SUITES, LiberoOptions, list_tasks, make
from rlvla.envs.registry import Suite, register_suite

for _suite in (*MAX_STEPS, *PRO_SUITES):
    register_suite(
        _suite,
        Suite(
            list_tasks=partial(list_tasks, _suite),
            make=partial(make, _suite),
            cameras=tuple(CAMERAS),
            options=LiberoOptions,
            image_size=IMAGE_SIZE,
            requires=("libero", "robosuite", "mujoco", "numba"),
        ),
    )

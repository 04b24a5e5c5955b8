"""The five LIBERO suites, and those of LIBERO-PRO and LIBERO-plus.

Registering them imports neither LIBERO nor robosuite.
"""

from functools import partial

from rlvla.envs.libero.env import CAMERAS, IMAGE_SIZE, MAX_STEPS, PRO_SUITES, LiberoOptions, list_tasks, make
from rlvla.envs.libero.plus import SUITES as PLUS_SUITES
from rlvla.envs.libero.plus import LiberoPlusOptions
from rlvla.envs.libero.plus import list_tasks as list_plus_tasks
from rlvla.envs.libero.plus import make as make_plus
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
for _suite in PLUS_SUITES:
    register_suite(
        _suite,
        Suite(
            list_tasks=partial(list_plus_tasks, _suite),
            make=partial(make_plus, _suite),
            cameras=tuple(CAMERAS),
            options=LiberoPlusOptions,
            image_size=IMAGE_SIZE,
            requires=("libero", "robosuite", "mujoco", "numba"),
        ),
    )

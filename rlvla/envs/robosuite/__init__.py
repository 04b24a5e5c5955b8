"""The robosuite suite: six tasks with a Panda arm. Registering it imports neither robosuite nor MuJoCo."""

from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.robosuite.env import CAMERAS, SUITE, RobosuiteOptions, list_tasks, make, task_problems
from rlvla.envs.robosuite.expert import make_robosuite_expert

# Only Lift by default: the tasks differ in episode length and action dimension.
register_suite(
    SUITE,
    Suite(
        list_tasks=list_tasks,
        make=make,
        cameras=tuple(CAMERAS),
        options=RobosuiteOptions,
        default_tasks=(0,),
        requires=("robosuite", "mujoco", "numba"),
        expert=make_robosuite_expert,
        task_problems=task_problems,
    ),
)

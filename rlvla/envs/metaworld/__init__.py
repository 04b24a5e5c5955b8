"""The Meta-World suite: fifty tasks. Registering it imports neither metaworld nor MuJoCo."""

from rlvla.envs.metaworld.env import CAMERAS, SUITE, MetaWorldOptions, list_tasks, make
from rlvla.envs.metaworld.expert import MetaWorldExpert
from rlvla.envs.metaworld.tasks import GROUPS, TASKS
from rlvla.envs.registry import Suite, register_suite

register_suite(
    SUITE,
    Suite(
        list_tasks=list_tasks,
        make=make,
        cameras=tuple(CAMERAS),
        options=MetaWorldOptions,
        requires=("metaworld", "mujoco", "fast_simplification"),
        expert=lambda task, config: MetaWorldExpert(TASKS[task.task_id].env_name, config),
        groups=GROUPS,
        kept=9,  # with the current one, those of MT10
        env_mb=lambda options: 55,
        chunk=5,  # as in published reinforcement learning
    ),
)

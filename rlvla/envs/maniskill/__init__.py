"""The ManiSkill suite: tabletop tasks of a Panda arm. Registering it imports neither mani_skill nor sapien."""

from rlvla.envs.maniskill.env import CAMERAS, SUITE, ManiSkillOptions, list_tasks, make, make_batched, task_problems
from rlvla.envs.registry import Suite, register_suite

register_suite(
    SUITE,
    Suite(
        list_tasks=list_tasks,
        make=make,
        cameras=CAMERAS,
        options=ManiSkillOptions,
        requires=("mani_skill", "sapien", "torch"),
        kept=3,
        task_problems=task_problems,
        make_batched=make_batched,
        batched_if=lambda options: options.get("physics") == "gpu",
    ),
)

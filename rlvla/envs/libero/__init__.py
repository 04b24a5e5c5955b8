"""The suites of LIBERO, LIBERO-PRO and LIBERO-plus. Registering them imports neither LIBERO nor robosuite."""

from __future__ import annotations

from functools import partial

from rlvla.envs.base import TaskSpec
from rlvla.envs.experts.base import Expert, ExpertConfig
from rlvla.envs.libero.env import CAMERAS, IMAGE_SIZE, MAX_STEPS, PRO_SUITES, LiberoOptions, env_mb, list_tasks, make
from rlvla.envs.libero.plus import SUITES as PLUS_SUITES
from rlvla.envs.libero.plus import LiberoPlusOptions
from rlvla.envs.libero.plus import list_tasks as list_plus_tasks
from rlvla.envs.libero.plus import make as make_plus
from rlvla.envs.registry import Suite, register_suite


def make_libero_expert(task: TaskSpec, config: ExpertConfig) -> Expert:
    """Create the scripted expert of a task."""
    from rlvla.envs.libero.expert import LiberoExpert

    return LiberoExpert(task, config)


_KINDS = (
    ((*MAX_STEPS, *PRO_SUITES), list_tasks, make, LiberoOptions, 9, make_libero_expert),  # all tasks of a suite of ten
    # Hundreds of tasks, with the package's renderer.
    (PLUS_SUITES, list_plus_tasks, make_plus, LiberoPlusOptions, 0, None),
)
for _suites, _list_tasks, _make, _options, _kept, _expert in _KINDS:
    for _suite in _suites:
        register_suite(
            _suite,
            Suite(
                list_tasks=partial(_list_tasks, _suite),
                make=partial(_make, _suite),
                cameras=tuple(CAMERAS),
                options=_options,
                expert=_expert,
                image_size=IMAGE_SIZE,
                kept=_kept,
                env_mb=env_mb,
                requires=("libero", "robosuite", "mujoco", "numba"),
            ),
        )

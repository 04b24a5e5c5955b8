"""Meta-World as an rlvla environment: suite `metaworld`, fifty tasks of a Sawyer arm that moves without turning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvla.envs.base import Observation, TaskSpec, check_init_state_id, task_of
from rlvla.envs.metaworld.tasks import TASKS
from rlvla.envs.mujoco.arm_env import MujocoArmEnv
from rlvla.envs.perturbations import PerturbedOptions, Surface, levels
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import Problem

SUITE = "metaworld"
# Camera name -> MuJoCo's name.
CAMERAS = {
    "corner4": "corner4",  # the position of `corner2` in public evaluations
    "corner": "corner",
    "corner2": "corner2",
    "corner3": "corner3",
    "topview": "topview",
    "behind": "behindGripper",
    "wrist": "gripperPOV",
    "sideview": "sideview",  # this and the next are not in the package
    "frontview": "frontview",
}
ACTION_DIM, PROPRIO_DIM, OBJECT_DIM = 4, 4, 35
CONTROL_FREQ = 80.0
STEPS, MAX_STEPS = 100, 500  # as in published reinforcement learning, and the limit of the package
NUM_INIT_STATES = 10_000
PROPOSITIONS = ("near", "grasped", "contact", "moved", "success")
REWARD_RANGE = (0.0, 10.0)
_NEAR, _MOVED = 0.06, 0.02  # meters: distance of hand and object, displacement of an object
_TABLE = Surface((-0.35, 0.45), (0.35, 0.90), 0.0)
# With sites, which mark the goals of many tasks.
_DRAWING = {"show_sites": True, "groups": (0, 1, 2), "show_sky": False, "light_meshes": True}


@dataclass(frozen=True)
class MetaWorldOptions(PerturbedOptions):
    """Options of the suite.

    Without cameras, nothing is rendered and no GL is needed. An episode ends at the first successful step, as in
    published results: some tasks do not stay successful.

    Attributes:
        object_state: append objects and goal (the package's observation) to proprio.
    """

    known_cameras: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    privileged_options: ClassVar[tuple[str, ...]] = ("object_state",)
    can_play_on: ClassVar[bool] = True

    cameras: tuple[str, ...] = ("corner4",)
    object_state: bool = arg(False, "append position and orientation of the task's objects to proprio")

    def problems(self) -> list[Problem]:
        """All problems of the values."""
        problems = super().problems()
        if self.max_steps is not None and self.max_steps > MAX_STEPS:
            text = f"--max_steps {self.max_steps}: the package ends episodes after {MAX_STEPS} steps"
            problems.append(Problem("max_steps", "out_of_range", text))
        return problems


def list_tasks(**kw) -> list[TaskSpec]:
    """The tasks of the suite; `kw` are the fields of `MetaWorldOptions`."""
    options = MetaWorldOptions(**kw)
    return [
        TaskSpec(
            suite=SUITE,
            task_id=task_id,
            name=task.name,
            instruction=task.instruction,
            max_steps=options.max_steps or STEPS,
            num_init_states=NUM_INIT_STATES,
            action_dim=ACTION_DIM,
            proprio_dim=PROPRIO_DIM + (OBJECT_DIM if options.object_state else 0),
            control_freq=CONTROL_FREQ,
            propositions=PROPOSITIONS,
            gripper_dims=(ACTION_DIM - 1,),
            machine="F(success)" if task.name.startswith("reach") else "F((near | moved) & F(success))",
            reward_range=REWARD_RANGE,
            dense_reward=True,
        )
        for task_id, task in enumerate(TASKS)
    ]


class MetaWorldEnv(MujocoArmEnv):
    """One Meta-World task.

    Actions [4] in [-1, 1]: displacement of the hand (1 = 1 cm, world axes), and effort of the fingers (1 closes).

    Proprio [4]: position of the hand in meters and opening of the fingers in [0, 1]. With `object_state`, the
    other 35 numbers of the package's observation follow: objects now and one step before, and the goal.

    Propositions: `contact` (the hand touches a movable body), `near` (contact, or the fingers' center is within 6 cm of
    an object or handle), `grasped` (both fingers touch), `moved` (an object is 2 cm from its initial position),
    `success`. Except for success, they are computed here: the package defines near and grasped differently per task.

    Privileged state: `observation` [39] of the package.
    """

    def __init__(self, spec: TaskSpec, options: MetaWorldOptions):
        from rlvla.envs.metaworld.sim import MetaWorldSim

        task = TASKS[spec.task_id]
        simulator = MetaWorldSim(task.env_name, spread=1.0 + levels(options.perturb).get("initial_state", 0.0))
        hold_steps = options.success_hold_steps or 1
        perturbed = _TABLE, task.paraphrases
        super().__init__(spec, options, simulator, CAMERAS, hold_steps, perturbed, **_DRAWING)
        self._shows_objects = options.object_state
        self._reward = lambda: self._sim.reward

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, num_init_states)."""
        self._require_open()
        check_init_state_id(self.task, init_state_id)
        self._sim.reset(init_state_id)
        return self._begin(init_state_id)

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        self._sim.step(action)
        touching = self._sim.touching()
        holds = {
            "near": any(touching) or self._sim.distance() < _NEAR,
            "grasped": all(touching),
            "contact": any(touching),
            "moved": self._sim.displacement() > _MOVED,
            "success": self._sim.success,
        }
        return bool(holds["success"]), frozenset(name for name, true in holds.items() if true)

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state for scripted experts; see the class docstring for the keys."""
        self._require_open()
        return {"observation": self._sim.observation.copy()}

    def _proprio(self) -> np.ndarray:
        length = PROPRIO_DIM + (OBJECT_DIM if self._shows_objects else 0)
        return self._sim.observation[:length].astype(np.float32)


def make(task_id: int, **kw) -> MetaWorldEnv:
    """Create the environment of a task; `kw` are the fields of `MetaWorldOptions`. Raises as `make_env`."""
    return MetaWorldEnv(task_of(SUITE, list_tasks(**kw), task_id), MetaWorldOptions(**kw))

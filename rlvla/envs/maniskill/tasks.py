"""Tasks and options of suite `maniskill`, known without the package."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlvla.envs.base import TaskSpec
from rlvla.envs.options import SuiteOptions
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import Problem

SUITE = "maniskill"
CAMERAS = ("base", "hand")
ACTION_DIM, PROPRIO_DIM = 7, 8
CONTROL_FREQ = 20.0
STEPS = 100
NUM_INIT_STATES = 10_000
LOWEST_REWARD = -1.0
PHYSICS = ("cpu", "gpu")


@dataclass(frozen=True)
class ManiSkillTask:
    """A task.

    Attributes:
        name: the package's name without its version.
        instruction: what the policy is told; ours, the package has none.
        events: proposition -> entry of the package's evaluation.
        state_dim: length of the simulation state of its objects and the robot.
        hand_camera: whether its robot carries a camera.
        only_on_cpu: why its episodes cannot share a simulator; "" if they can.
        highest_reward: of a step; the package's normalized reward exceeds 1 in one task.
    """

    name: str
    instruction: str
    state_dim: int
    events: Mapping[str, str] = field(default_factory=dict)
    hand_camera: bool = False
    only_on_cpu: str = ""
    highest_reward: float = 1.0

    @property
    def propositions(self) -> tuple[str, ...]:
        """Of the task, success last."""
        return (*self.events, "success")


TASKS = (
    ManiSkillTask("PushCube", "push the cube into the target", 70),
    ManiSkillTask("PullCube", "pull the cube into the target", 70),
    ManiSkillTask(
        "PickCube", "move the cube to the green ball", 70, {"grasped": "is_grasped", "placed": "is_obj_placed"}
    ),
    ManiSkillTask(
        "StackCube",
        "put the red cube on the green cube",
        70,
        {"grasped": "is_cubeA_grasped", "placed": "is_cubeA_on_cubeB"},
        hand_camera=True,
    ),
    ManiSkillTask("LiftPegUpright", "stand the peg upright", 57),
    ManiSkillTask(
        "PokeCube", "poke the cube with the peg", 83, {"grasped": "is_peg_grasped", "placed": "is_peg_cube_fit"}
    ),
    ManiSkillTask(
        "PlaceSphere", "put the ball into the bin", 70, {"grasped": "is_obj_grasped", "placed": "is_obj_on_bin"}
    ),
    ManiSkillTask(
        "RollBall", "roll the ball to the target", 70, only_on_cpu="its reward depends on more than the state"
    ),
    ManiSkillTask(
        "PegInsertionSide",
        "insert the peg into the hole",
        70,
        hand_camera=True,
        only_on_cpu="initial states differ in the shape of the peg",
    ),
    ManiSkillTask("PullCubeTool", "pull the cube closer with the hook", 70, highest_reward=3.0),
)


@dataclass(frozen=True)
class ManiSkillOptions(SuiteOptions):
    """Options of the suite.

    Rendering needs a Vulkan driver, on a CPU Mesa's lavapipe in a version newer than that of Debian 12.

    Attributes:
        object_state: append the simulation state of objects and robot to proprio.
        physics: "cpu" simulates every episode by itself; "gpu" those of a worker at once (`--envs_per_worker`), with
            other initial states, and not to the bit.
    """

    known_cameras: ClassVar[tuple[str, ...]] = CAMERAS
    privileged_options: ClassVar[tuple[str, ...]] = ("object_state",)
    can_play_on: ClassVar[bool] = True

    cameras: tuple[str, ...] = ("base",)
    object_state: bool = arg(False, "append position and orientation of the task's objects to proprio")
    physics: str = arg(
        PHYSICS[0], "cpu: a simulator per episode; gpu: one for all episodes of a task in a worker", choices=PHYSICS
    )


def list_tasks(**kw: Any) -> list[TaskSpec]:
    """The tasks of the suite; `kw` are the fields of `ManiSkillOptions`."""
    options = ManiSkillOptions(**kw)
    return [
        TaskSpec(
            suite=SUITE,
            task_id=task_id,
            name=re.sub(r"(?<=[a-z])(?=[A-Z])", "_", task.name).lower(),
            instruction=task.instruction,
            max_steps=options.max_steps or STEPS,
            num_init_states=NUM_INIT_STATES,
            action_dim=ACTION_DIM,
            proprio_dim=PROPRIO_DIM + (task.state_dim if options.object_state else 0),
            control_freq=CONTROL_FREQ,
            propositions=task.propositions,
            gripper_dims=(ACTION_DIM - 1,),
            machine="F(grasped & F(success))" if "grasped" in task.events else "F(success)",
            reward_range=(LOWEST_REWARD, task.highest_reward),
            dense_reward=True,
        )
        for task_id, task in enumerate(TASKS)
    ]


def task_problems(tasks: Sequence[TaskSpec], options: Mapping[str, Any]) -> list[Problem]:
    """What the chosen tasks do not have of the options."""
    facts = [(task.name, TASKS[task.task_id]) for task in tasks]
    found = []
    bare = [name for name, task in facts if not task.hand_camera]
    if "hand" in options.get("cameras", ()) and bare:
        text = f"--cameras hand: the robot of {', '.join(bare)} carries no camera; take base"
        found.append(Problem("cameras", "unavailable", text))
    alone = [f"{name} ({task.only_on_cpu})" for name, task in facts if task.only_on_cpu]
    if options.get("physics") == "gpu" and alone:
        text = f"--physics gpu: not for {', '.join(alone)}; take cpu, or leave these out (--task_ids)"
        found.append(Problem("physics", "unavailable", text))
    return found

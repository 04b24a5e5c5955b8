"""A common description of the arm of a robosuite environment, for robosuite 1.4 and 1.5.

1.5 composes a robot of parts and stores the attributes of each arm in dicts. Its control differs in two ways that
affect a policy: without a rotation in the action, the goal orientation is the current one (1.4 keeps the last goal),
and the finger command moves once per control step (1.4: in every physics substep).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvla.envs.robosuite.importing import import_robosuite

# robosuite 1.5's name of a Panda's only arm.
_ARM = "right"


def has_composite_controllers() -> bool:
    """Whether robosuite 1.5 is installed, whose robots are composed of parts."""
    return import_robosuite().__version__.startswith("1.5.")


def osc_pose_config() -> dict[str, Any]:
    """Controller configuration for a Panda under OSC_POSE with robosuite's default gains."""
    robosuite = import_robosuite()
    if has_composite_controllers():
        return robosuite.load_composite_controller_config(controller="BASIC")
    return robosuite.load_controller_config(default_controller="OSC_POSE")


@dataclass(frozen=True)
class ArmParts:
    """Controller, model and MuJoCo indices of an arm.

    Attributes:
        controller: robosuite's OSC controller, the source of gains and scales.
        gripper: robosuite's model of the gripper or tool.
        eef_site: id of the end-effector site.
        actuators: ids of the arm's actuators.
        finger_qpos: position addresses of the finger joints; empty for a rigid tool.
        finger_actuators: ids of the finger actuators.
        keeps_orientation: whether an action without rotation keeps the goal orientation.
        ramps_in_substeps: whether the finger command moves in every substep rather than once per control step.
    """

    controller: Any
    gripper: Any
    eef_site: int
    actuators: np.ndarray
    finger_qpos: list[int]
    finger_actuators: list[int]
    keeps_orientation: bool
    ramps_in_substeps: bool


def arm_parts(robot: Any) -> ArmParts:
    """The parts of a Panda; `robot` is `env.robots[0]` of either version."""
    if has_composite_controllers():
        return ArmParts(
            controller=robot.part_controllers[_ARM],
            gripper=robot.gripper[_ARM],
            eef_site=int(robot.eef_site_id[_ARM]),
            actuators=np.asarray(robot._ref_arm_joint_actuator_indexes),
            finger_qpos=robot._ref_gripper_joint_pos_indexes[_ARM],
            finger_actuators=robot._ref_joint_gripper_actuator_indexes[_ARM],
            keeps_orientation=False,
            ramps_in_substeps=False,
        )
    return ArmParts(
        controller=robot.controller,
        gripper=robot.gripper,
        eef_site=int(robot.eef_site_id),
        actuators=np.asarray(robot._ref_joint_actuator_indexes),
        finger_qpos=robot._ref_gripper_joint_pos_indexes,
        finger_actuators=robot._ref_joint_gripper_actuator_indexes,
        keeps_orientation=True,
        ramps_in_substeps=True,
    )

"""Proprioception of the arm under robosuite's names of observables, in which robomimic's datasets record it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import mujoco

# Observable -> width; for a Panda with its gripper.
WIDTHS = {
    "robot0_eef_pos": 3,
    "robot0_eef_quat": 4,
    "robot0_gripper_qpos": 2,
    "robot0_gripper_qvel": 2,
    "robot0_joint_pos": 7,
    "robot0_joint_pos_cos": 7,
    "robot0_joint_pos_sin": 7,
    "robot0_joint_vel": 7,
}
_HAND = "robot0_right_hand"  # the body whose orientation robosuite observes


class RobotState:
    """Reads observables of a Panda.

    These are position (meters, world axes) and quaternion (w last) of the end effector, and positions and velocities of
    the arm's joints (radians) and fingers (meters).

    Args:
        names: keys of `WIDTHS`, in order.
        model: the compiled model.
        data: its state.
        eef_site: id of the end-effector site.
        joints: ids of the arm's joints.
        finger_qpos: position addresses of the finger joints.
    """

    def __init__(
        self,
        names: Sequence[str],
        model: mujoco.MjModel,
        data: mujoco.MjData,
        *,
        eef_site: int,
        joints: np.ndarray,
        finger_qpos: np.ndarray,
    ):
        self._names, self._data, self._site, self._hand = list(names), data, eef_site, model.body(_HAND).id
        self._qpos, self._qvel = model.jnt_qposadr[joints], model.jnt_dofadr[joints]
        self._finger_qpos = finger_qpos
        fingers = [int(np.flatnonzero(model.jnt_qposadr == address)[0]) for address in finger_qpos]
        self._finger_qvel = model.jnt_dofadr[fingers]

    def __call__(self) -> np.ndarray:
        """The observables, concatenated, float32."""
        data = self._data
        joints = data.qpos[self._qpos]
        quat = data.xquat[self._hand]
        values = {
            "robot0_eef_pos": data.site_xpos[self._site],
            "robot0_eef_quat": quat[[1, 2, 3, 0]],
            "robot0_gripper_qpos": data.qpos[self._finger_qpos],
            "robot0_gripper_qvel": data.qvel[self._finger_qvel],
            "robot0_joint_pos": joints,
            "robot0_joint_pos_cos": np.cos(joints),
            "robot0_joint_pos_sin": np.sin(joints),
            "robot0_joint_vel": data.qvel[self._qvel],
        }
        return np.concatenate([values[name] for name in self._names]).astype(np.float32)

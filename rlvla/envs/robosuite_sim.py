"""A robosuite environment, built by robosuite and stepped through MuJoCo's raw interface.

robosuite's own `step` runs `mj_forward` twice before each `mj_step` and updates observables that nobody reads. Here a
substep is `mj_step1`, the arm's torques, `mj_step2`; the trajectory is the same up to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mujoco
import numpy as np

from rlvla.envs.osc import OscController
from rlvla.envs.robosuite_import import import_robosuite

ARM = "Panda"
# Seeds what robosuite draws while it builds a model (object sizes), so that every process has the same model.
_BUILD_SEED = 0


@contextlib.contextmanager
def numpy_seed(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, from which robosuite draws, and put the caller's state back afterwards."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def _build(task_name: str, control_freq: float, edit_xml: Callable[[str], str]) -> Any:
    """The environment object of robosuite without renderer and cameras, its model compiled from the edited XML."""
    robosuite = import_robosuite()
    task_class: Any = robosuite.environments.base.REGISTERED_ENVS[task_name]

    class Edited(task_class):
        def _initialize_sim(self, xml_string=None):
            super()._initialize_sim(edit_xml(xml_string or self.model.get_xml()))

    with numpy_seed(_BUILD_SEED):
        return Edited(
            robots=ARM,
            controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            use_object_obs=False,
            control_freq=control_freq,
            hard_reset=False,
            ignore_done=True,
        )


class RobosuiteSim:
    """Physics of one robosuite task with a Panda arm under OSC_POSE.

    Attributes:
        env: robosuite's own object: models, placement sampler, success check. Never stepped or reset.
        model: the compiled model.
        data: its state.

    Args:
        task_name: robosuite's name of the environment.
        control_freq: control steps per simulated second.
        edit_xml: applied to the model's XML before it is compiled.

    Raises:
        MissingExtraError: robosuite is not installed.
        ConfigError: the installed version is not supported, or GL is missing.
    """

    def __init__(self, task_name: str, control_freq: float, edit_xml: Callable[[str], str] = lambda xml: xml):
        self.env = _build(task_name, control_freq, edit_xml)
        self.model: mujoco.MjModel = self.env.sim.model._model
        self.data: mujoco.MjData = self.env.sim.data._data
        # Nothing here reads the force and torque sensors, and nothing in the dynamics depends on them.
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_SENSOR
        self.substeps = int(self.env.control_timestep / self.env.model_timestep)
        self._setup_robot()

    def _setup_robot(self) -> None:
        robot = self.env.robots[0]
        controller, gripper = robot.controller, robot.gripper
        self._arm_qpos = np.asarray(robot._ref_joint_pos_indexes)
        self._arm_init = np.array(robot.init_qpos, dtype=np.float64)
        self._arm_noise = float(robot.initialization_noise["magnitude"])
        self.eef_site = int(robot.eef_site_id)
        self.osc = OscController(
            self.model,
            self.data,
            site=self.eef_site,
            dofs=robot._ref_joint_vel_indexes,
            qpos_index=self._arm_qpos,
            actuators=robot._ref_joint_actuator_indexes,
            kp=controller.kp,
            kd=controller.kd,
            output_max=controller.output_max,
        )
        self.gripper_qpos_index = np.asarray(robot._ref_gripper_joint_pos_indexes)
        self._gripper_init = np.array(gripper.init_qpos, dtype=np.float64)
        self._gripper_speed = float(gripper.speed)
        first, last = robot._ref_joint_gripper_actuator_indexes
        self._gripper_actuators = slice(first, last + 1)
        low, high = self.model.actuator_ctrlrange[self._gripper_actuators].T
        self._gripper_bias, self._gripper_weight = 0.5 * (high + low), 0.5 * (high - low)
        self._fingers = np.array([-1.0, 1.0])  # the fingers' joints run in opposite directions
        self._gripper_command = np.zeros(2)
        self._pads = [self.geom_ids(gripper.important_geoms[f"{side}_fingerpad"]) for side in ("left", "right")]

    def geom_ids(self, names: list[str]) -> frozenset[int]:
        """Ids of the geoms with these names."""
        return frozenset(self.model.geom(name).id for name in names)

    def reset(self, rng: np.random.Generator) -> None:
        """Set the initial state drawn from `rng`: noise on the arm's joints, then robosuite's object placement.

        Nothing of an earlier episode survives: warm start, time, controls and the gripper's ramp are cleared.
        """
        model, data = self.model, self.data
        mujoco.mj_resetData(model, data)
        data.qpos[self._arm_qpos] = self._arm_init + self._arm_noise * rng.standard_normal(len(self._arm_init))
        data.qpos[self.gripper_qpos_index] = self._gripper_init
        with numpy_seed(int(rng.integers(2**32))):
            placements = self.env.placement_initializer.sample()
        for position, quat, item in placements.values():
            address = model.joint(item.joints[0]).qposadr[0]
            data.qpos[address : address + 7] = [*position, *quat]
        self._gripper_command = np.zeros(2)
        mujoco.mj_forward(model, data)
        self.osc.reset()

    def step(self, action: np.ndarray) -> None:
        """One control step for action [7] in [-1, 1]: position and rotation deltas, then gripper (-1 open, 1 close)."""
        model, data, osc = self.model, self.data, self.osc
        action = action.astype(np.float64)
        gripper_controls = self._ramp_gripper(action[6])
        gripper_ctrl, step1, step2 = data.ctrl[self._gripper_actuators], mujoco.mj_step1, mujoco.mj_step2
        for substep in range(self.substeps):
            step1(model, data)
            if substep == 0:
                osc.set_goal(action[:6])
            osc.apply()
            gripper_ctrl[:] = gripper_controls[substep]
            step2(model, data)

    def _ramp_gripper(self, action: float) -> np.ndarray:
        """Controls [substeps, 2] of the fingers, whose command moves by the gripper's speed in every substep."""
        ramp = np.empty((self.substeps + 1, 2))
        ramp[0] = self._gripper_command
        ramp[1:] = self._fingers * (self._gripper_speed * np.sign(action))
        commands = np.clip(np.cumsum(ramp, axis=0)[1:], -1.0, 1.0)
        self._gripper_command = commands[-1]
        return self._gripper_bias + self._gripper_weight * commands

    def success(self) -> bool:
        """What robosuite itself counts as success."""
        return bool(self.env._check_success())

    def grasped(self, geoms: frozenset[int]) -> bool:
        """Both finger pads touch one of these geoms (what robosuite's `_check_grasp` asks)."""
        contacts = self.data.contact.geom.tolist()
        return all(
            any((a in pad and b in geoms) or (b in pad and a in geoms) for a, b in contacts) for pad in self._pads
        )

"""Environments built by robosuite and stepped through the raw MuJoCo API.

robosuite's `step` runs `mj_forward` twice before each `mj_step` and updates observables that are never read. Here, a
substep consists of `mj_step1`, the arm's torques and `mj_step2`; trajectories are the same up to rounding.

`arm_parts` hides the differences between robosuite 1.4 and 1.5, which composes a robot of parts and stores the
attributes of each arm in dicts. Two differences affect a policy: without a rotation in the action, 1.5 sets the goal
orientation to the current one (1.4 keeps the last goal), and the finger command moves once per control step (1.4: in
every physics substep).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from rlvla.envs.robosuite.importing import import_robosuite
from rlvla.envs.robosuite.osc import OscController
from rlvla.envs.robosuite.robot_state import RobotState

ARM = "Panda"
# Seed for the randomness in model construction (object sizes), so that all processes build the same model.
BUILD_SEED = 0
JOINT_MARGIN = 0.1  # radians
_ARM = "right"  # robosuite 1.5's name for the only arm of a Panda


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


@contextlib.contextmanager
def numpy_seed(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, which robosuite 1.4 uses, and restore its state afterwards."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


@contextlib.contextmanager
def draws_from(env: Any, seed: int) -> Iterator[None]:
    """Seed the environment's randomness; in robosuite 1.5, its samplers share a generator."""
    if hasattr(env, "rng"):
        env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    with numpy_seed(seed):
        yield


def with_edited_xml(task_class: Any, edit_xml: Callable[[str], str]) -> Any:
    """A subclass of the environment whose model is compiled from the edited XML."""

    class Edited(task_class):
        def _initialize_sim(self, xml_string=None):
            super()._initialize_sim(edit_xml(xml_string or self.model.get_xml()))

    Edited.__name__ = task_class.__name__  # LIBERO compares it with the name of the problem
    return Edited


def physics_only(control_freq: float) -> dict[str, Any]:
    """Keyword arguments for a robosuite environment without renderer, cameras and hard resets."""
    return {
        "controller_configs": osc_pose_config(),
        "has_renderer": False,
        "has_offscreen_renderer": False,
        "use_camera_obs": False,
        "control_freq": control_freq,
        "hard_reset": False,
        "ignore_done": True,
    }


def build_robosuite(task_name: str, control_freq: float, edit_xml: Callable[[str], str] = lambda xml: xml) -> Any:
    """Create a robosuite environment object.

    Args:
        task_name: robosuite's name of the environment.
        control_freq: control steps per simulated second.
        edit_xml: applied to the model's XML before compilation.

    Raises:
        MissingExtraError: robosuite is not installed.
        ConfigError: the installed version is not supported, or GL does not work.
    """
    task_class = import_robosuite().environments.base.REGISTERED_ENVS[task_name]
    seed = {"seed": BUILD_SEED} if has_composite_controllers() else {}
    with numpy_seed(BUILD_SEED):
        return with_edited_xml(task_class, edit_xml)(
            robots=ARM, use_object_obs=False, **physics_only(control_freq), **seed
        )


def place_objects(env: Any, model: mujoco.MjModel, data: mujoco.MjData) -> None:
    """Sample and apply an object placement as robosuite's reset does; call inside `draws_from`.

    For movable objects this sets joint positions; objects fixed during an episode (door, target visuals, dirt) are
    moved in the model.
    """
    if hasattr(env, "wiped_markers"):
        env.model.mujoco_arena.reset_arena(env.sim)
        env.wiped_markers, env.collisions, env.f_excess = [], 0, 0
        return
    for position, quat, item in env.placement_initializer.sample().values():
        joint = model.joint(item.joints[0]) if item.joints else None
        if joint is not None and joint.type[0] == mujoco.mjtJoint.mjJNT_FREE:
            address = joint.qposadr[0]
            data.qpos[address : address + 7] = [*position, *quat]
        else:
            body = model.body(item.root_body)
            body.pos, body.quat = position, quat
    for name in ("bin1", "bin2"):
        if hasattr(env, f"{name}_pos"):
            model.body(name).pos = getattr(env, f"{name}_pos")
    if getattr(env, "single_object_mode", 0):
        items, used = (env.nuts, env.nut_id) if hasattr(env, "nuts") else (env.objects, env.object_id)
        env.clear_objects([item.name for index, item in enumerate(items) if index != used])


class RobosuiteSim:
    """Physics of one robosuite task with a Panda arm under OSC_POSE.

    Attributes:
        env: robosuite's environment (models, placement sampler, success check); never stepped or reset.
        model: the compiled model.
        data: its state.

    Args:
        env: from `build_robosuite`, or any other robosuite environment.
    """

    def __init__(self, env: Any):
        self.env = env
        self.model: mujoco.MjModel = self.env.sim.model._model
        self.data: mujoco.MjData = self.env.sim.data._data
        # Force and torque sensors are never read and do not affect the dynamics.
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_SENSOR
        self.substeps = int(self.env.control_timestep / self.env.model_timestep)
        self._wipes = hasattr(self.env, "wiped_markers")
        self._setup_robot()

    def _setup_robot(self) -> None:
        robot = self.env.robots[0]
        arm = arm_parts(robot)
        controller, gripper = arm.controller, arm.gripper
        robot.check_q_limits = self.near_joint_limit  # robosuite's version prints a line at every step
        self._arm_qpos = np.asarray(robot._ref_joint_pos_indexes)
        self._arm_init = np.array(robot.init_qpos, dtype=np.float64)
        self._arm_noise = float(robot.initialization_noise["magnitude"])
        self.eef_site = arm.eef_site
        self.osc = OscController(
            self.model,
            self.data,
            site=self.eef_site,
            dofs=robot._ref_joint_vel_indexes,
            qpos_index=self._arm_qpos,
            actuators=arm.actuators,
            kp=controller.kp,
            kd=controller.kd,
            output_max=controller.output_max,
            keeps_orientation=arm.keeps_orientation,
        )
        self._arm_joints = np.asarray(robot._ref_joint_indexes)
        self.arm_geoms = self.geom_ids(robot.robot_model.contact_geoms)
        self.gripper_geoms = self.geom_ids(gripper.contact_geoms)
        # A rigid tool (Wipe) has no joints.
        self.gripper_qpos_index = np.asarray(arm.finger_qpos, dtype=np.int64)
        fingers = len(self.gripper_qpos_index)
        self._gripper_init = np.array(gripper.init_qpos if fingers else [], dtype=np.float64)
        self._gripper_speed = float(gripper.speed)
        actuators, self._ramps_in_substeps = arm.finger_actuators, arm.ramps_in_substeps
        self._gripper_actuators = slice(actuators[0], actuators[-1] + 1) if fingers else slice(0)
        low, high = self.model.actuator_ctrlrange[self._gripper_actuators].T
        self._gripper_bias, self._gripper_weight = 0.5 * (high + low), 0.5 * (high - low)
        self._fingers = np.array([-1.0, 1.0])[:fingers]  # the finger joints move in opposite directions
        self._gripper_command = np.zeros(fingers)
        self._pads = [self.geom_ids(gripper.important_geoms[f"{side}_fingerpad"]) for side in ("left", "right")]

    def robot_state(self, names: Sequence[str]) -> RobotState:
        """A reader of these observables."""
        robot = self.env.robots[0]
        joints = np.array([self.model.joint(name).id for name in robot.robot_joints])
        return RobotState(
            names, self.model, self.data, eef_site=self.eef_site, joints=joints, finger_qpos=self.gripper_qpos_index
        )

    def geom_ids(self, names: Sequence[str]) -> frozenset[int]:
        """Ids of the geoms with these names."""
        return frozenset(self.model.geom(name).id for name in names)

    def reset(self, rng: np.random.Generator) -> None:
        """Sample the initial state: noise on the arm's joints, then robosuite's object placement.

        The state of earlier episodes is cleared, including warm start, time, controls and gripper ramp.
        """
        model, data = self.model, self.data
        mujoco.mj_resetData(model, data)
        data.qpos[self._arm_qpos] = self._arm_init + self._arm_noise * rng.standard_normal(len(self._arm_init))
        data.qpos[self.gripper_qpos_index] = self._gripper_init
        with draws_from(self.env, int(rng.integers(2**32))):
            place_objects(self.env, model, data)
        self._gripper_command = np.zeros_like(self._gripper_init)
        mujoco.mj_forward(model, data)
        self.osc.reset()

    def spread_objects(self, factor: float) -> None:
        """Widen the ranges of object positions by a factor about their centers."""
        sampler = self.env.placement_initializer
        for sub_sampler in getattr(sampler, "samplers", {"": sampler}).values():
            for name in ("x_range", "y_range"):
                low, high = getattr(sub_sampler, name)
                middle, half = (low + high) / 2, factor * (high - low) / 2
                setattr(sub_sampler, name, (middle - half, middle + half))

    def restore(self, state: np.ndarray) -> None:
        """Set a flat state [1 + nq + nv] (time, positions, velocities), as `set_init_state` of LIBERO does.

        The controller's rest posture, goal orientation and first goal are relative to the arm's home position, as in
        published evaluations on LIBERO.
        """
        model, data = self.model, self.data
        mujoco.mj_resetData(model, data)
        data.qpos[self._arm_qpos] = self._arm_init
        mujoco.mj_forward(model, data)
        self.osc.reset()
        self.osc.freeze()
        self._gripper_command = np.zeros_like(self._gripper_init)
        data.time, data.qpos[:], data.qvel[:] = state[0], state[1 : 1 + model.nq], state[1 + model.nq :]
        mujoco.mj_forward(model, data)

    def step(self, action: np.ndarray) -> None:
        """Execute a control step with action [7] in [-1, 1]: position and rotation deltas, gripper (-1 open, 1 close).

        Without a gripper, the action is [6].
        """
        model, data, osc = self.model, self.data, self.osc
        action = action.astype(np.float64)
        gripper_controls = self._ramp_gripper(action[6]) if len(self._fingers) else np.empty((self.substeps, 0))
        gripper_ctrl, step1, step2 = data.ctrl[self._gripper_actuators], mujoco.mj_step1, mujoco.mj_step2
        for substep in range(self.substeps):
            step1(model, data)
            if substep == 0:
                osc.set_goal(action[:6])
            osc.apply()
            gripper_ctrl[:] = gripper_controls[substep]
            step2(model, data)
        if self._wipes:
            self.env.reward()  # records the markers under the tool

    def shaped_reward(self) -> float:
        """Robosuite's shaped reward, clipped to [0, 1]."""
        self.env.reward_shaping = True
        return float(np.clip(self.env.reward(None), 0.0, 1.0))

    @property
    def gripper_steps(self) -> int:
        """Control steps in which the finger command goes from closed to open; 0 without a gripper."""
        if not len(self._fingers):
            return 0
        per_step = self._gripper_speed * (self.substeps if self._ramps_in_substeps else 1)
        return math.ceil(2.0 / per_step - 1e-9)

    def _ramp_gripper(self, action: float) -> np.ndarray:
        """Finger controls [substeps, 2]; the command changes by at most the gripper's speed at a time."""
        ramp = np.empty((self.substeps + 1, 2))
        ramp[0] = self._gripper_command
        ramp[1:] = self._fingers * (self._gripper_speed * np.sign(action))
        if not self._ramps_in_substeps:
            ramp[2:] = 0.0
        commands = np.clip(np.cumsum(ramp, axis=0)[1:], -1.0, 1.0)
        self._gripper_command = commands[-1]
        return self._gripper_bias + self._gripper_weight * commands

    def success(self) -> bool:
        """Whether robosuite's success check passes."""
        return bool(self.env._check_success())

    def near_joint_limit(self) -> bool:
        """Whether a joint of the arm is within 0.1 rad of its limits, as in robosuite's `check_q_limits`."""
        low, high = self.model.jnt_range[self._arm_joints].T
        qpos = self.data.qpos[self._arm_qpos]
        return bool(((qpos <= low + JOINT_MARGIN) | (qpos >= high - JOINT_MARGIN))[low != high].any())

    def arm_in_collision(self) -> bool:
        """Whether the arm (not its tool) touches anything or a joint is near its limit."""
        touched = self.data.contact.geom.reshape(-1).tolist()
        return not self.arm_geoms.isdisjoint(touched) or self.near_joint_limit()

    def touching(self, geoms: frozenset[int], others: frozenset[int]) -> bool:
        """Whether one of `geoms` is in contact with one of `others`."""
        contacts = self.data.contact.geom.tolist()
        return any((a in geoms and b in others) or (b in geoms and a in others) for a, b in contacts)

    def grasped(self, geoms: frozenset[int]) -> bool:
        """Whether both finger pads touch one of these geoms, as in robosuite's `_check_grasp`."""
        return all(self.touching(pad, geoms) for pad in self._pads)

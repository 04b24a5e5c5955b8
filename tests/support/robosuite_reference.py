"""Stock robosuite, put into the state of one of our environments: the reference the tests compare with."""

import mujoco
import numpy as np

from rlvla.envs.mujoco.gl import make_gl_context
from rlvla.envs.robosuite.importing import import_robosuite
from rlvla.utils.errors import ConfigError, MissingExtraError


def require_simulator():
    """Skip where robosuite or GL is missing."""
    try:
        import_robosuite()
        make_gl_context(1, 1).free()
    except (MissingExtraError, ConfigError) as error:
        import pytest  # an interpreter that compares physics does without it

        pytest.skip(str(error))


class StockTask:
    """A task of robosuite, built from the same drawn sizes and stepped by robosuite itself."""

    def __init__(self, name="Lift", control_freq=20):
        from rlvla.envs.robosuite.sim import arm_parts, has_composite_controllers, numpy_seed, osc_pose_config

        robosuite = import_robosuite()
        with numpy_seed(0):
            self.env = robosuite.make(
                name,
                robots="Panda",
                controller_configs=osc_pose_config(),
                has_renderer=False,
                has_offscreen_renderer=False,
                use_camera_obs=False,
                control_freq=control_freq,
                hard_reset=False,
                ignore_done=True,
                **({"seed": 0} if has_composite_controllers() else {}),
            )
            self.env.reset()
        self.parts = arm_parts(self.env.robots[0])
        self.model, self.data = self.env.sim.model._model, self.env.sim.data._data

    def start_from(self, sim):
        """Begin an episode at rest where the `RobosuiteSim` stands, with what it has moved in its model."""
        robot, parts, qpos = self.env.robots[0], self.parts, sim.data.qpos
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = qpos
        self.model.body_pos[:], self.model.body_quat[:] = sim.model.body_pos, sim.model.body_quat
        mujoco.mj_forward(self.model, self.data)
        parts.gripper.current_action = np.zeros(2)
        parts.controller.update_initial_joints(qpos[robot._ref_joint_pos_indexes])
        parts.controller.new_update = True

    def step(self, action):
        self.env.step(np.asarray(action, dtype=np.float64))

    def success(self):
        return bool(self.env._check_success())

    def grasped(self):
        return bool(self.env._check_grasp(self.parts.gripper, self.env.cube))

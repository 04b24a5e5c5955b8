"""One task of the package `metaworld`, with initial states by number."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

from rlvla.envs.mujoco.cameras import CameraPlacement
from rlvla.utils.errors import MissingExtraError

_FINGERS = (("rightpad", "rightclaw"), ("leftpad", "leftclaw"))
# Cameras that are upside down in the package, and the half turn about the optical axis that corrects them.
_ROLLED = ("corner", "corner2", "corner3", "corner4")
_HALF_ROLL = np.array([0.0, 0.0, 0.0, 1.0])
# Close enough that goals and objects are several pixels wide in a 64-pixel image.
_CLOSEUPS = {
    "sideview": CameraPlacement((0.85, 0.75, 0.55), (0.0, 0.72, 0.13), 34.0),
    "frontview": CameraPlacement((0.0, 1.45, 0.75), (0.0, 0.71, 0.10), 36.0),
}


def _with_closeups(package: Any) -> type:
    """Subclass of a package environment whose model also has the cameras in `_CLOSEUPS`."""

    class WithCloseups(package):
        def _initialize_simulation(self) -> tuple[mujoco.MjModel, mujoco.MjData]:
            spec = mujoco.MjSpec.from_file(self.fullpath)
            for name, placement in _CLOSEUPS.items():
                camera = spec.worldbody.add_camera(name=name, pos=placement.position, fovy=placement.fovy)
                camera.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
                camera.alt.xyaxes = placement.axes()
            model = spec.compile()
            return model, mujoco.MjData(model)

    return WithCloseups


class MetaWorldSim:
    """Simulation of a task, with objects and goal sampled per initial state.

    Attributes:
        env: the package's environment.
        model: the compiled model.
        data: its state.
        observation: [39] of the package: hand, fingers, objects; the same of the previous step; goal.
        reward: dense reward of the last step, in [0, 10].
        info: the package's `info` of the last step.

    Args:
        name: the package's name of the task.
        spread: factor of the ranges that objects and goal are drawn from.

    Raises:
        MissingExtraError: metaworld is not installed.
    """

    def __init__(self, name: str, spread: float = 1.0):
        try:
            from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        except ImportError as error:
            text = (
                f"Meta-World is not usable here ({error}). Install it with: bash examples/scripts/install_metaworld.sh"
            )
            raise MissingExtraError(text) from error

        self.env: Any = _with_closeups(ALL_V3_ENVIRONMENTS[name])()
        # The cached space hides goals and would clip them to 0.
        self.env._partially_observable = False
        self.env.__dict__.pop("sawyer_observation_space", None)
        self.env._freeze_rand_vec, self.env.seeded_rand_vec, self.env._set_task_called = False, True, True
        if spread != 1.0:
            space: Any = self.env._random_reset_space
            middle, half = (space.low + space.high) / 2, spread * (space.high - space.low) / 2
            half[2::3] /= spread  # keep heights, or goals would lie below the table
            self.env._random_reset_space = type(space)(middle - half, middle + half, dtype=space.dtype)
            # Observed goals are clipped to this space.
            self.env.goal_space = type(space)(-np.inf, np.inf, self.env.goal_space.shape, np.float64)
        self.model: mujoco.MjModel = self.env.model
        self.data: mujoco.MjData = self.env.data
        self.observation, self.reward, self.info = np.zeros(39), 0.0, dict[str, Any]()
        moves = np.zeros(self.model.nbody, dtype=bool)  # children come after their parents
        for body in range(1, self.model.nbody):
            moves[body] = self.model.body_dofnum[body] > 0 or moves[self.model.body_parentid[body]]
        robot = self._below("right_hand") | self._below("base") | self._below("hand")
        self._movable = (moves & ~robot)[self.model.geom_bodyid]
        self._fingers = [
            self._below(pad)[self.model.geom_bodyid] | self._below(claw)[self.model.geom_bodyid]
            for pad, claw in _FINGERS
        ]
        self._hand = self._below("hand")[self.model.geom_bodyid]
        for name in _ROLLED:
            camera = self.model.camera(name).id
            mujoco.mju_mulQuat(self.model.cam_quat[camera], self.model.cam_quat[camera].copy(), _HALF_ROLL)

    def _below(self, name: str) -> np.ndarray:
        """Mask [nbody] bool of a body and its descendants; all False if there is no such body."""
        subtree = np.zeros(self.model.nbody, dtype=bool)
        first = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_BODY, name)
        if first >= 0:
            subtree[first] = True
            for body in range(first + 1, self.model.nbody):
                subtree[body] = subtree[self.model.body_parentid[body]]
        return subtree

    def reset(self, init_state_id: int) -> None:
        """Start an episode."""
        self.env.seed(init_state_id)
        self.observation, _ = self.env.reset()
        self._start = self._objects().copy()

    def step(self, action: np.ndarray) -> None:
        """Execute an action [4]."""
        self.observation, reward, _, _, self.info = self.env.step(action)
        self.reward = float(np.clip(reward, 0.0, 10.0))

    @property
    def success(self) -> bool:
        """Success of the last step, as defined by the package."""
        return bool(self.info["success"] > 0.5)

    def touching(self) -> list[bool]:
        """Whether the hand, the right and the left finger touch a movable body."""
        first, second = self.data.contact.geom.T
        bodies = (self._hand, *self._fingers)
        hits = [(body[first] & self._movable[second]) | (self._movable[first] & body[second]) for body in bodies]
        return [bool(hit.any()) for hit in hits]

    def distance(self) -> float:
        """Distance from the center of the fingers to the nearest object or handle, in meters."""
        return float(np.linalg.norm(self._objects() - self.env.tcp_center, axis=1).min())

    def displacement(self) -> float:
        """Maximum distance of an object from its initial position, in meters."""
        return float(np.linalg.norm(self._objects() - self._start, axis=1).max())

    def _objects(self) -> np.ndarray:
        """Object positions [N, 3]."""
        return np.asarray(self.env._get_pos_objects(), dtype=np.float64).reshape(-1, 3)

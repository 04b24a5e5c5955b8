"""Scripted experts for the robosuite suite: proportional control on privileged state, no rotation."""

from __future__ import annotations

import numpy as np

from rlvla.envs.experts.base import Expert, ExpertConfig, disturb, draw_offset
from rlvla.utils.errors import ConfigError

OPEN, CLOSE = -1.0, 1.0
_ARM = slice(0, 3)


class LiftExpert:
    """Moves above the cube, descends, closes the gripper, lifts.

    The stages only go forward, except that a cube lost while lifting is not looked for again: the policy that
    learns from these demonstrations sees one clean pass.

    Args:
        config: how far it departs from its best behaviour.
    """

    gain = 20.0  # action per metre of error; an action of 1 asks for 5 cm
    hover = 0.05  # metres above the cube below which the gripper may not be while still beside it
    reach = 0.012  # metres of horizontal error at which the descent begins
    depth = 0.008  # metres of height error at which the gripper closes
    close_steps = 3  # steps between closing and lifting at 20 Hz
    lift_height = 0.12  # metres above the table to which the cube is carried

    def __init__(self, config: ExpertConfig):
        self.config = config
        self.reset(np.random.default_rng(0))

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode; draws the episode's offset."""
        self._rng = rng
        self._offset = draw_offset(self.config, rng)
        self._descending, self._at_cube_for = False, -1

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """One action [7] float32 in [-1, 1]: displacement, rotation (zero), gripper."""
        eef, cube, table = state["eef_pos"], state["cube_pos"], float(state["table_height"])
        target = np.array([*(cube[:2] + self._offset), cube[2]])
        error = target - eef
        self._descending |= bool(np.hypot(error[0], error[1]) < self.reach)
        if self._at_cube_for >= 0 or (self._descending and abs(error[2]) < self.depth):
            self._at_cube_for += 1
        if self._at_cube_for >= self.close_steps:
            error = np.array([0.0, 0.0, table + self.lift_height - eef[2]])
        elif self._at_cube_for >= 0:
            error = error * [1.0, 1.0, 1.0]
        elif not self._descending:
            error[2] += self.hover
        action = np.zeros(7)
        action[_ARM] = np.clip(self.gain * error, -1.0, 1.0)
        action[6] = self._gripper()
        return disturb(action, _ARM, self.config, self._rng)

    def _gripper(self) -> float:
        return CLOSE if self._at_cube_for >= max(self.config.gripper_shift, 0) else OPEN


_EXPERTS = {"Lift": LiftExpert}


def make_robosuite_expert(task_name: str, config: ExpertConfig) -> Expert:
    """The expert of a robosuite task.

    Raises:
        ConfigError: there is none for this task.
    """
    if task_name not in _EXPERTS:
        raise ConfigError(f"no scripted expert for robosuite task {task_name}; there are: {', '.join(_EXPERTS)}")
    return _EXPERTS[task_name](config)

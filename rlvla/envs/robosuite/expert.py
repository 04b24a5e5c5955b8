"""Scripted experts for the robosuite suite: proportional control on privileged state, without rotation in Lift."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.envs.experts.base import Expert, ExpertConfig, disturb, draw_offset
from rlvla.envs.robosuite.stack_expert import StackExpert
from rlvla.utils.errors import ConfigError

OPEN, CLOSE = -1.0, 1.0
_ARM = slice(0, 3)


class LiftExpert:
    """Moves above the cube, descends, closes the gripper and lifts. It does not retry if it misses or loses the cube.

    Retries would hide the systematic errors that `ExpertConfig` introduces.

    Args:
        config: deviations from the best behavior. A late gripper is lifted before it has closed; an early one closes
            that many steps (estimated from the speed of descent) before it reaches the cube.
    """

    gain = 20.0  # action per meter of error: saturates at 5 cm, the displacement for an action of 1
    hover = 0.05  # meters above the cube during the approach
    reach = 0.012  # horizontal error in meters at which the descent begins
    depth = 0.008  # meters above or below the cube's center at which the gripper closes
    close_steps = 3  # steps between closing and lifting
    lift_height = 0.12  # meters above the table to which the cube is lifted

    def __init__(self, config: ExpertConfig):
        self.config = config
        self.reset(np.random.default_rng(0))

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode and draw its offset."""
        self._rng = rng
        self._offset = draw_offset(self.config, rng)
        self._descending = False
        self._steps_at_cube = -1  # counts from 0 once the cube is reached
        self._last_height = np.inf

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """One action [7] float32 in [-1, 1]: displacement, rotation (zero), gripper."""
        eef, cube, table = state["eef_pos"], state["cube_pos"], float(state["table_height"])
        error = cube - eef
        error[:2] += self._offset
        height = -float(error[2])
        self._descending |= bool(np.hypot(error[0], error[1]) < self.reach)
        if self._steps_at_cube >= 0 or (self._descending and abs(height) < self.depth):
            self._steps_at_cube += 1
        closing = self._closing(height)
        self._last_height = height
        if self._steps_at_cube >= self.close_steps:
            error[:] = 0.0, 0.0, table + self.lift_height - eef[2]
        elif not self._descending:
            error[2] += self.hover
        action = np.zeros(7)
        action[_ARM] = np.clip(self.gain * error, -1.0, 1.0)
        action[6] = CLOSE if closing else OPEN
        return disturb(action, _ARM, self.config, self._rng)

    def _closing(self, height: float) -> bool:
        """Whether to close the gripper now, given its height above the cube in meters."""
        shift = self.config.gripper_shift
        if self._steps_at_cube >= 0:
            return self._steps_at_cube >= shift
        speed = self._last_height - height  # meters per step
        return self._descending and speed > 0 and (height - self.depth) / speed <= -shift if shift < 0 else False


_EXPERTS: dict[str, Callable[[ExpertConfig], Expert]] = {"Lift": LiftExpert, "Stack": StackExpert}


def make_robosuite_expert(task_name: str, config: ExpertConfig) -> Expert:
    """The expert of a robosuite task.

    Raises:
        ConfigError: the task has no expert.
    """
    if task_name not in _EXPERTS:
        raise ConfigError(
            f"no scripted expert for robosuite task {task_name}; there are: {', '.join(_EXPERTS)}. A policy that was "
            "trained on state can play instead (--policy FOLDER)"
        )
    return _EXPERTS[task_name](config)


def robosuite_expert(task: TaskSpec, config: ExpertConfig) -> Expert:
    """The expert of a task, with the signature of `Suite.expert`."""
    return make_robosuite_expert(task.name, config)

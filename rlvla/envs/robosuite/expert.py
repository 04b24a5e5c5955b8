"""Scripted experts for Lift and Stack of the robosuite suite: proportional control on privileged state."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.envs.experts.base import Expert, ExpertConfig, disturb, draw_offset
from rlvla.envs.robosuite.rotation import quarter_turn, yaw_of
from rlvla.utils.errors import ConfigError

OPEN, CLOSE = -1.0, 1.0
# Privileged state -> displacement [3] in meters, rotation in radians, gripper.
PhaseTarget = Callable[[dict[str, np.ndarray]], tuple[np.ndarray, float, float]]


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
        action[:3] = np.clip(self.gain * error, -1.0, 1.0)
        action[6] = CLOSE if closing else OPEN
        return disturb(action, slice(0, 3), self.config, self._rng)

    def _closing(self, height: float) -> bool:
        """Whether to close the gripper now, given its height above the cube in meters."""
        shift = self.config.gripper_shift
        if self._steps_at_cube >= 0:
            return self._steps_at_cube >= shift
        speed = self._last_height - height  # meters per step
        return self._descending and speed > 0 and (height - self.depth) / speed <= -shift if shift < 0 else False


class StackExpert:
    """Aligns the fingers with cube A, grasps it, lifts it, carries it over cube B, lowers it and releases it.

    Like the Lift expert, it does not retry.

    Args:
        config: deviations from the best behavior. The offset shifts the point at which cube A is grasped.

    Raises:
        ConfigError: `gripper_shift` is negative.
    """

    gain = 20.0  # action per meter of error: saturates at 5 cm, the displacement for an action of 1
    turn_gain = 2.0  # action per radian: an action of 1 rotates by 0.5 rad
    hover = 0.08  # meters above cube A during the approach, and above its destination during transport
    reach, aligned = 0.006, 0.06  # errors in meters and radians below which the descent begins,
    settle_steps = 3  # once they have stayed below for this many steps
    depth = 0.006  # meters from the cube's center at which the gripper closes
    close_steps, open_steps = 6, 4  # steps for closing and opening the gripper
    rest_height = 0.045  # meters between the centers of the stacked cubes
    release_height = 0.003  # meters above the resting place at which the gripper opens
    close_by = 0.1  # distance of the cubes in meters below which a finger between them would touch cube B
    place_reach = 0.006  # horizontal error in meters above cube B at which the descent begins

    def __init__(self, config: ExpertConfig):
        if config.gripper_shift < 0:
            raise ConfigError(
                f"the expert of Stack cannot close early: gripper_shift {config.gripper_shift} must be >= 0"
            )
        self.config = config
        self.reset(np.random.default_rng(0))

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode and draw its offset."""
        self._rng = rng
        self._offset = np.append(draw_offset(self.config, rng), 0.0)
        self._phase: PhaseTarget = self._approach
        self._steps = 0
        self._yaw: float | None = None

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """One action [7] float32 in [-1, 1]: displacement, rotation about the vertical axis, gripper."""
        self._steps += 1
        error, turn, gripper = self._phase(state)
        action = np.zeros(7)
        action[:3] = np.clip(self.gain * error, -1.0, 1.0)
        action[5] = np.clip(self.turn_gain * turn, -1.0, 1.0)
        action[6] = gripper
        return disturb(action, slice(0, 6), self.config, self._rng)

    def _enter(self, phase: PhaseTarget) -> None:
        self._phase, self._steps = phase, 0

    def _to_cube(self, state: dict[str, np.ndarray]) -> tuple[np.ndarray, float]:
        """Displacement from the fingers to cube A in meters, and the rotation that aligns them with its sides."""
        if self._yaw is None:
            self._yaw = self._choose_yaw(state)
        error = state["cubeA_pos"] + self._offset - state["eef_pos"]
        turn = self._yaw - yaw_of(state["eef_quat"])
        return error, (turn + math.pi) % (2.0 * math.pi) - math.pi

    def _choose_yaw(self, state: dict[str, np.ndarray]) -> float:
        """The nearest yaw aligned with cube A at which no finger is between cubes that are close together."""
        hand = yaw_of(state["eef_quat"])
        yaw = hand + quarter_turn(yaw_of(state["cubeA_quat"]) - hand)
        way = state["cubeB_pos"][:2] - state["cubeA_pos"][:2]
        # The fingers open along the x axis of the end effector.
        along = abs(math.cos(yaw) * way[0] + math.sin(yaw) * way[1])
        across = abs(-math.sin(yaw) * way[0] + math.cos(yaw) * way[1])
        if np.hypot(*way) < self.close_by and along > across:
            return yaw + math.pi / 2 if quarter_turn(yaw - hand) < 0 else yaw - math.pi / 2
        return yaw

    def _approach(self, state: dict[str, np.ndarray]) -> tuple[np.ndarray, float, float]:
        error, turn = self._to_cube(state)
        if np.hypot(error[0], error[1]) >= self.reach or abs(turn) >= self.aligned:
            self._steps = 0
        if self._steps >= self.settle_steps:
            self._enter(self._descend)
        return error + [0.0, 0.0, self.hover], turn, OPEN

    def _descend(self, state: dict[str, np.ndarray]) -> tuple[np.ndarray, float, float]:
        error, turn = self._to_cube(state)
        if abs(error[2]) < self.depth:
            self._enter(self._grasp)
        return error, turn, OPEN

    def _grasp(self, state: dict[str, np.ndarray]) -> tuple[np.ndarray, float, float]:
        closing = self._steps > self.config.gripper_shift
        if self._steps >= self.close_steps:
            self._enter(self._lift)
        return np.zeros(3), 0.0, CLOSE if closing else OPEN

    def _lift(self, state: dict[str, np.ndarray]) -> tuple[np.ndarray, float, float]:
        height = float(state["cubeB_pos"][2]) + self.rest_height + self.hover - float(state["cubeA_pos"][2])
        if height < 0.01 or self._steps > 40:
            self._enter(self._carry)
        return np.array([0.0, 0.0, height]), 0.0, CLOSE

    def _to_place(self, state: dict[str, np.ndarray]) -> np.ndarray:
        return state["cubeB_pos"] + [0.0, 0.0, self.rest_height] - state["cubeA_pos"]

    def _carry(self, state: dict[str, np.ndarray]) -> tuple[np.ndarray, float, float]:
        error = self._to_place(state)
        if np.hypot(error[0], error[1]) < self.place_reach or self._steps > 60:
            self._enter(self._lower)
        return error + [0.0, 0.0, self.hover], 0.0, CLOSE

    def _lower(self, state: dict[str, np.ndarray]) -> tuple[np.ndarray, float, float]:
        error = self._to_place(state)
        if error[2] > -self.release_height or self._steps > 60:
            self._enter(self._release)
        return error, 0.0, CLOSE

    def _release(self, state: dict[str, np.ndarray]) -> tuple[np.ndarray, float, float]:
        rise = 0.0 if self._steps <= self.open_steps else 0.05
        return np.array([0.0, 0.0, rise]), 0.0, OPEN


_EXPERTS: dict[str, Callable[[ExpertConfig], Expert]] = {"Lift": LiftExpert, "Stack": StackExpert}


def make_robosuite_expert(task: TaskSpec, config: ExpertConfig) -> Expert:
    """Create the expert of a task; ConfigError if it has none."""
    if task.name not in _EXPERTS:
        raise ConfigError(
            f"no scripted expert for robosuite task {task.name}; there are: {', '.join(_EXPERTS)}. Record a policy "
            "that was trained on state instead (--policy FOLDER)"
        )
    return _EXPERTS[task.name](config)

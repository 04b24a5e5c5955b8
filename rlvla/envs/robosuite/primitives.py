"""Action primitives of the robosuite tasks: short controllers that a policy selects and parameterizes.

Nasiriany et al., "Augmenting Reinforcement Learning with Behavior Primitives for Diverse Manipulation Tasks" (MAPLE),
2022. A primitive is a generator of OSC actions, each computed from the current pose of the hand; it ends when its
target is reached or its time is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from rlvla.envs.robosuite.rotation import HOME_YAW, MOST_TURN, pointing_down, rotation_vector, wrapped

OPEN, KEEP, CLOSE = -1.0, 0.0, 1.0
# (name, number of parameters in [-1, 1]), with a gripper and without.
PRIMITIVES = (("reach", 3), ("grasp", 4), ("push", 7), ("open", 0), ("atomic", 5))
TOOL_PRIMITIVES = (("reach", 3), ("push", 7), ("atomic", 4))
# Time limit of a primitive in simulated seconds, times `Workspace.time_scale`. `open` takes as long as the fingers
# need, `atomic` one step.
SECONDS = {"reach": 1.5, "grasp": 2.0, "push": 2.0}
# Minimum of the default time limit of an episode: exploration takes several primitives.
EPISODE_SECONDS = 15.0

_STEP_SIZE, _TURN_SIZE = 0.05, 0.5  # meters and radians of an OSC action of 1
_PUSH = np.array([0.25, 0.25, 0.05])  # maximum displacement of a push, meters
_POSITION_TOLERANCE = 0.008  # meters
_TRANSIT_TOLERANCE, _TRANSIT_HEIGHT = 0.015, 0.03  # meters, for waypoints
_TURN_TOLERANCE, _TRANSIT_TURN = 0.06, 0.3  # radians
_GAIN = 2.0  # the arm lags behind its goal, and friction stops it short of it
_SETTLE_SECONDS = 0.25  # for a released object to come to rest; as long as success must last
_CLOSING_SHARE = 0.75  # fraction of the fingers' travel, times `Workspace.time_scale`: enough for a cube

# Name of the affordance score in `ChunkResult.components`.
AFFORDANCE = "affordance"
# Distance in meters from a keypoint up to which the affordance is 1: a radius, or a bound per axis.
_THRESHOLDS: dict[str, float | tuple[float, float, float]] = {
    "reach": 0.06,
    "grasp": 0.03,
    "push": (0.12, 0.12, 0.04),
}
_STEEPNESS = 10.0  # per meter

# Position [3] and rotation matrix [3, 3] of the hand.
Pose = Callable[[], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Workspace:
    """Box of the target positions of primitives; meters, world frame.

    Attributes:
        low, high: corners of the box of `reach`.
        object_height: maximum z of `grasp` and `push`.
        lift_height: z at which the hand moves sideways.
        time_scale: factor of the time limits, 1 for a small table.
    """

    low: tuple[float, float, float]
    high: tuple[float, float, float]
    object_height: float
    lift_height: float
    time_scale: float = 1.0

    def position(self, params: np.ndarray, highest: float) -> np.ndarray:
        """Scale parameters [3] in [-1, 1] to a position [3] in the box up to height `highest`."""
        low, high = np.array(self.low), np.array([*self.high[:2], highest])
        return low + 0.5 * (np.asarray(params, dtype=np.float64) + 1.0) * (high - low)

    def params(self, position: np.ndarray, highest: float) -> np.ndarray:
        """The inverse of `position`; outside [-1, 1] for positions outside the box."""
        low, high = np.array(self.low), np.array([*self.high[:2], highest])
        return 2.0 * (np.asarray(position) - low) / (high - low) - 1.0


def most_steps(workspace: Workspace, control_freq: float) -> dict[str, int]:
    """Name -> maximum environment steps, of primitives with a target."""
    return {name: math.ceil(seconds * workspace.time_scale * control_freq) for name, seconds in SECONDS.items()}


def macro_steps(workspace: Workspace, control_freq: float) -> int:
    """Maximum environment steps of a primitive."""
    return max(most_steps(workspace, control_freq).values())


def action_dim(primitives: tuple[tuple[str, int], ...]) -> int:
    """Length of an action: a score per primitive, then the parameters of the selected one."""
    return len(primitives) + max(count for _, count in primitives)


class PrimitiveController:
    """Executes the primitives of a task.

    Args:
        primitives: their names and numbers of parameters.
        workspace: the box of their target positions.
        control_freq: environment steps per simulated second.
        gripper_steps: steps in which the fingers open from closed.
        pose: the current pose of the hand.
    """

    def __init__(
        self,
        primitives: tuple[tuple[str, int], ...],
        workspace: Workspace,
        control_freq: float,
        gripper_steps: int,
        pose: Pose,
    ):
        self._primitives, self._space, self._pose = primitives, workspace, pose
        self._has_gripper = gripper_steps > 0
        self._steps = most_steps(workspace, control_freq)
        settled = gripper_steps + math.ceil(_SETTLE_SECONDS * control_freq)
        self._open_steps = min(settled, macro_steps(workspace, control_freq))
        self._close_steps = min(
            math.ceil(_CLOSING_SHARE * workspace.time_scale * gripper_steps), self._steps["grasp"] - 1
        )
        self.reset()

    def reset(self) -> None:
        """Start an episode."""
        self._gripper = KEEP

    def chosen(self, row: np.ndarray) -> tuple[str, np.ndarray]:
        """The primitive with the highest score in an action [D] (the first of equal ones), and its parameters."""
        name, count = self._primitives[int(np.argmax(row[: len(self._primitives)]))]
        return name, np.asarray(row[len(self._primitives) :][:count], dtype=np.float64)

    def target(self, name: str, params: np.ndarray) -> np.ndarray | None:
        """First target position [3] of a primitive; None if it has none."""
        return self._position(name, params) if name in SECONDS else None

    def _position(self, name: str, params: np.ndarray) -> np.ndarray:
        highest = self._space.high[2] if name == "reach" else self._space.object_height
        return self._space.position(params[:3], highest)

    def start(self, row: np.ndarray) -> Iterator[np.ndarray]:
        """OSC actions, at least one, of the primitive in an action [D] in [-1, 1]."""
        name, params = self.chosen(row)
        actions = getattr(self, f"_{name}")(params)
        first = next(actions, None)
        yield self._action(np.zeros(3), self._yaw(), self._gripper) if first is None else first
        yield from actions

    def _reach(self, params: np.ndarray) -> Iterator[np.ndarray]:
        target = self._position("reach", params)
        yield from islice(self._travel(target, self._yaw(), self._gripper), self._steps["reach"])

    def _grasp(self, params: np.ndarray) -> Iterator[np.ndarray]:
        yaw, approach = self._turned(params[3]), self._steps["grasp"] - self._close_steps
        yield from islice(self._travel(self._position("grasp", params), yaw, OPEN), approach)
        yield from self._hold(CLOSE, self._close_steps)

    def _push(self, params: np.ndarray) -> Iterator[np.ndarray]:
        start, yaw = self._position("push", params), self._turned(params[3])

        def both() -> Iterator[np.ndarray]:
            yield from self._travel(start, yaw, CLOSE)
            yield from self._move(start + _PUSH * params[4:7], yaw, CLOSE)

        yield from islice(both(), self._steps["push"])

    def _open(self, params: np.ndarray) -> Iterator[np.ndarray]:
        return self._hold(OPEN, self._open_steps)

    def _atomic(self, params: np.ndarray) -> Iterator[np.ndarray]:
        self._gripper = float(np.sign(params[4])) if self._has_gripper else KEEP
        action = np.array([*params[:3], 0.0, 0.0, *params[3:]])
        yield action

    def _travel(self, target: np.ndarray, yaw: float, gripper: float) -> Iterator[np.ndarray]:
        """Move up to the lift height (unless above the target), over the target, and down."""
        above = np.array([*target[:2], max(self._space.lift_height, target[2])])
        position, _ = self._pose()
        if np.hypot(*(target - position)[:2]) > _TRANSIT_TOLERANCE:
            up = np.array([*position[:2], above[2]])
            yield from self._move(up, yaw, gripper, until=lambda: self._pose()[0][2] > up[2] - _TRANSIT_HEIGHT)

            def over_target() -> bool:
                close = np.hypot(*(target - self._pose()[0])[:2]) < _TRANSIT_TOLERANCE
                return close and abs(yaw - self._yaw()) < _TRANSIT_TURN

            yield from self._move(above, yaw, gripper, until=over_target)
        yield from self._move(target, yaw, gripper)

    def _move(
        self, target: np.ndarray, yaw: float, gripper: float, until: Callable[[], bool] | None = None
    ) -> Iterator[np.ndarray]:
        """Move straight to the target until it is reached, or until the condition holds."""

        def reached() -> bool:
            apart = float(np.linalg.norm(target - self._pose()[0]))
            return apart < _POSITION_TOLERANCE and abs(yaw - self._yaw()) < _TURN_TOLERANCE

        while not (until or reached)():
            yield self._action(_GAIN * (target - self._pose()[0]) / _STEP_SIZE, yaw, gripper)

    def _hold(self, gripper: float, steps: int) -> Iterator[np.ndarray]:
        """Keep the pose while the fingers move."""
        position, yaw = self._pose()[0].copy(), self._yaw()
        for _ in range(steps):
            yield self._action((position - self._pose()[0]) / _STEP_SIZE, yaw, gripper)

    def _action(self, displacement: np.ndarray, yaw: float, gripper: float) -> np.ndarray:
        """OSC action toward a yaw with the hand pointing down; later primitives keep the gripper command."""
        self._gripper = gripper
        _, rotation = self._pose()
        now = self._yaw()
        # In small turns, so that the hand turns back the way it came, within the limits of the wrist.
        next_yaw = now + float(np.clip(yaw - now, -_TURN_SIZE, _TURN_SIZE))
        turn = rotation_vector(pointing_down(next_yaw) @ rotation.T) / _TURN_SIZE
        displacement = displacement / max(1.0, float(np.abs(displacement).max()))  # straight, however long
        action = np.concatenate([displacement, np.clip(turn, -1.0, 1.0)])
        return np.append(action, gripper) if self._has_gripper else action

    def _yaw(self) -> float:
        """Yaw of the hand within half a turn of home."""
        rotation = self._pose()[1]
        return HOME_YAW + wrapped(math.atan2(rotation[1, 0], rotation[0, 0]) - HOME_YAW, 2.0 * math.pi)

    @staticmethod
    def _turned(param: float) -> float:
        """Scale a parameter in [-1, 1] to a yaw."""
        return HOME_YAW + MOST_TURN * float(param)


def affordance(name: str, target: np.ndarray | None, keypoints: Sequence[np.ndarray]) -> float:
    """Affordance score of MAPLE, in [0, 1]: 1 - tanh(10 max(0, distance to the nearest keypoint - threshold)).

    Args:
        name: the primitive.
        target: first target position [3]; None gives 1.
        keypoints: positions [3] of suitable objects; none gives 1.
    """
    if target is None or not len(keypoints):
        return 1.0
    nearest = min(_excess(np.abs(target - keypoint), _THRESHOLDS[name]) for keypoint in keypoints)
    return 1.0 - float(np.tanh(_STEEPNESS * nearest))


def _excess(apart: np.ndarray, threshold: float | tuple[float, float, float]) -> float:
    """Distance of a point from the ball or box of the threshold; `apart` [3] holds absolute differences."""
    if isinstance(threshold, float):
        return max(float(np.linalg.norm(apart)) - threshold, 0.0)
    return float(np.linalg.norm(np.maximum(apart - np.array(threshold), 0.0)))

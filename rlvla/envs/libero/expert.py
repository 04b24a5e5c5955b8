"""Scripted expert for all tasks of LIBERO: skills that bring about the predicates of a BDDL goal.

The skills read geometry, joints and regions from the privileged state and contain no constants of a task. An action
follows from the state: which predicate is next, and for it whether its object is held, above its destination or still
to be grasped. So the expert also takes over in the middle of an episode. It remembers its plans (a grasp, a placement)
and counts steps where the state does not show that something is under way, such as closing fingers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.envs.experts.base import ExpertConfig, disturb, draw_offset
from rlvla.envs.libero import grasps, install
from rlvla.envs.libero.env import TaskFacts, proposition_of
from rlvla.envs.libero.grasps import HeightMap, candidates_of, plan_grasp, plan_placement
from rlvla.envs.robosuite.rotation import HOME_YAW, pointing_down, rotation_vector, wrapped
from rlvla.utils.errors import ConfigError

OPEN, CLOSE = -1.0, 1.0
STEP_SIZE, TURN_SIZE = 0.05, 0.5  # meters and radians of an action of 1
# The arm stops up to 12 mm short of a target where it is stretched: errors within `_NEAR` meters are integrated.
_NEAR, _INTEGRAL, _MOST_INTEGRAL = 0.03, 0.25, 0.03
_SLOW = 0.004  # meters per step above which nothing is integrated
_MOST_TURN = 0.5  # action of a rotation
HOVER = 0.07  # meters above a grasp from which the hand descends
MARGIN = 0.02  # meters by which the hand or a held object clears obstacles
ALIGNED, REACHED, TURNED = 0.008, 0.006, 0.1  # meters, meters, radians
CLOSE_STEPS, GIVE_UP_STEPS, OPEN_STEPS = 7, 22, 14
STILL, STILL_STEPS = 0.0008, 6  # meters per step below which the hand stands still, for that many steps
OPEN_FRACTION = 0.8  # of a joint's range, from which on things fit in
PUSH_TILT = math.radians(60)  # of a hand that pushes a drawer: fingers forward and down
STUCK_STEPS, ESCAPE_STEPS = 25, 10
PROTRUSION = 0.004  # meters above the rim of a drawer from which an object blocks it
MAX_PRESS_STEPS = 60  # of pressing an object into a drawer, which is then pushed in any case
OVERHANG = 0.3  # clearance in meters above an object that is lifted
OPEN_GAP = 0.07  # meters between open fingers
SLIP = 0.03  # meters by which a held object may move in the hand
_HAND_RADIUS = 0.07  # meters around the grip site to keep clear of obstacles on the way


def matrix_of(quat: np.ndarray) -> np.ndarray:
    """Rotation matrix [3, 3] of a quaternion [4] (w first)."""
    w, x, y, z = quat
    return np.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ])  # fmt: skip


class Scene:
    """A privileged state by name of object, region and predicate."""

    def __init__(self, state: dict[str, np.ndarray]):
        self._state = state
        self.hand, self.base = state["eef_pos"], state["base_pos"]

    @property
    def keys(self) -> list[str]:
        """All entries of the state."""
        return list(self._state)

    @cached_property
    def hand_mat(self) -> np.ndarray:
        """Orientation [3, 3] of the hand."""
        return matrix_of(self._state["eef_quat"])

    @cached_property
    def bodies(self) -> list[str]:
        """Names of all objects, fixtures and moving parts."""
        return [key.removesuffix("_points") for key in self._state if key.endswith("_points")]

    @property
    def gap(self) -> float:
        """Distance of the fingers in meters."""
        return float(np.abs(self._state["gripper_qpos"]).sum())

    def has(self, key: str) -> bool:
        """Whether the state has this entry."""
        return key in self._state

    def get(self, name: str, key: str) -> np.ndarray:
        """An entry of the state, such as the `size` of a region."""
        return self._state[f"{name}_{key}"]

    def pos(self, name: str) -> np.ndarray:
        """Position [3] of an object, part or region."""
        return self._state[f"{name}_pos"]

    def mat(self, name: str) -> np.ndarray:
        """Orientation [3, 3] of an object, part or region."""
        return matrix_of(self._state[f"{name}_quat"])

    def points(self, name: str) -> np.ndarray:
        """Points [N, 3] on an object or part, in the world frame."""
        return self._state[f"{name}_points"] @ self.mat(name).T + self.pos(name)

    def others(self, name: str) -> np.ndarray:
        """Points [M, 3] on everything but one object or part."""
        return np.concatenate([self.points(other) for other in self.bodies if other != name])

    def holds(self, predicate: tuple[str, ...]) -> bool:
        """Whether a goal predicate holds."""
        return bool(self._state[f"holds_{proposition_of(predicate)}"])

    def grasped(self, name: str) -> bool:
        """Whether both finger pads touch an object."""
        return bool(self._state[f"grasped_{name}"])

    def touched(self, name: str) -> bool:
        """Whether the gripper touches an object."""
        return bool(self._state[f"touched_{name}"])


@dataclass(frozen=True)
class Target:
    """Pose of the hand, and the gripper's action."""

    position: np.ndarray
    mat: np.ndarray
    gripper: float


@dataclass
class Memory:
    """The expert's plans and counters for one predicate."""

    grasp: grasps.Grasp | None = None
    grasp_of: np.ndarray | None = None  # position [3] of the object for which it was planned
    heights: HeightMap | None = None  # of everything but the object
    opening: bool = False  # a drawer or door, for something to be put in
    closing: int = 0  # steps since the fingers began to close
    held_at: np.ndarray | None = None  # position [3] of the held object in the frame of the hand
    tilt: float = 0.0  # of the hand that holds the object, radians
    placement: grasps.Placement | None = None
    placed_on: np.ndarray | None = None  # position [3] of the destination for which it was planned
    place_yaw: float = HOME_YAW
    lowering: bool = False
    leaving: bool = False  # releasing an object whose predicate holds
    fronted: bool = False  # the hand is in front of a fixture
    pushing: bool = False
    pressed: int = 0  # steps of pressing an object into a drawer
    turned_from: float = 0.0  # yaw of the hand and position of the joint when a knob was grasped
    joint_from: float = 0.0
    releasing: int = 0
    released_at: np.ndarray | None = None  # position [3] of the hand


class LiberoExpert:
    """Brings about the predicates of a task's goal, one after another, and tries again what has failed.

    Args:
        task: the task.
        config: deviations from the best behavior. The offset shifts the point at which an object is grasped.

    Raises:
        ConfigError: `gripper_shift` is negative.
    """

    def __init__(self, task: TaskSpec, config: ExpertConfig):
        if config.gripper_shift < 0:
            raise ConfigError(
                f"the expert of LIBERO cannot close early: gripper_shift {config.gripper_shift} must be >= 0"
            )
        self.config = config
        definition = install.bddl_file(task.suite, task.name).read_text(encoding="utf-8")
        self.goal = TaskFacts.of(definition).goal
        self.reset(np.random.default_rng(0))

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode and draw its offset."""
        self._rng = rng
        self._offset = np.append(draw_offset(self.config, rng), 0.0)
        self._predicate: tuple[str, ...] | None = None
        self._memory = Memory()
        self._avoid: dict[str, list[grasps.Grasp]] = {}
        self._integral = np.zeros(3)
        self._last_hand: np.ndarray | None = None
        self._still = 0
        self._last_gap, self._settled = np.inf, False
        self._anchor, self._blocked, self._escaping = np.full(3, np.inf), 0, 0

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """One action [7] float32 in [-1, 1]: displacement, rotation, gripper."""
        self.scene = scene = Scene(state)
        moved = np.inf if self._last_hand is None else float(np.linalg.norm(scene.hand - self._last_hand))
        self._still, self._last_hand = self._still + 1 if moved < STILL else 0, scene.hand
        self._settled, self._last_gap = abs(scene.gap - self._last_gap) < STILL, scene.gap
        target = self._escape() or self._target()
        error = target.position - scene.hand
        near = float(np.linalg.norm(error)) < _NEAR and moved < _SLOW
        self._integral = 0.8 * self._integral
        if near:
            integral = self._integral / 0.8 + _INTEGRAL * error
            self._integral = np.clip(integral, -_MOST_INTEGRAL, _MOST_INTEGRAL)
        turn = rotation_vector(target.mat @ scene.hand_mat.T)
        turn[np.abs(turn) < 0.03] = 0.0
        action = np.zeros(7)
        action[:3] = np.clip((error + self._integral) / STEP_SIZE, -1.0, 1.0)
        action[3:6] = np.clip(turn / TURN_SIZE, -_MOST_TURN, _MOST_TURN)
        grasp = self._memory.grasp
        if self._escaping or (grasp is not None and grasp.tilt and not turn.any()):
            action[3:6] = 1e-3  # without a rotation, the controller keeps its last goal
        action[6] = target.gripper
        return disturb(action, slice(0, 6), self.config, self._rng)

    def _escape(self) -> Target | None:
        """Draw the hand up and towards the robot where it is stuck: a stretched arm may not find back by itself."""
        memory, hand = self._memory, self.scene.hand
        busy = memory.closing or memory.releasing
        if float(np.linalg.norm(hand - self._anchor)) > 0.02 or (busy and memory.held_at is None):
            self._anchor, self._blocked = hand, 0
        self._blocked += 1
        if self._blocked > STUCK_STEPS:
            self._blocked, self._escaping = 0, ESCAPE_STEPS
        if not self._escaping:
            return None
        self._escaping -= 1
        if not self._escaping:
            memory.grasp = None
        back = self.scene.base - hand
        way = np.append(back[:2] / np.linalg.norm(back[:2]), 0.7)
        return Target(hand + 0.05 * way, self.scene.hand_mat, CLOSE if memory.held_at is not None else OPEN)

    def _target(self) -> Target:
        predicate = next((p for p in self.goal if not self.scene.holds(p)), None)
        if predicate != self._predicate:
            if self._predicate is not None and self._memory.lowering and not self._memory.releasing:
                # `in` may hold high above the bottom, from where the object would tumble.
                kind, name, where = self._predicate
                return self._pick_and_place(kind, name, where)
            moved_on = self._predicate is not None and self.scene.gap < OPEN_GAP
            self._predicate, self._memory = predicate, Memory(releasing=int(moved_on), leaving=moved_on)
        if self._memory.leaving:  # what the last predicate was about is still in the hand
            return self._release()
        if predicate is None:
            return self._stay(OPEN)
        kind, *names = predicate
        if kind in ("on", "in"):
            door = self._door_of(names[1]) if kind == "in" else None  # a stove's knob shuts nothing
            if door is not None and self._memory.held_at is None and (self._memory.opening or self._is_shut(door)):
                return self._open(door)
            return self._pick_and_place(kind, names[0], names[1])
        if kind in ("turnon", "turnoff"):
            return self._turn(names[0], 1.0 if kind == "turnon" else -1.0)
        skill = {"open": self._open, "close": self._close_part}
        return skill[kind](names[0]) if kind in skill else self._stay(OPEN)

    def _is_shut(self, name: str) -> bool:
        """Whether a drawer or door is not open by most of its range."""
        position, limits = float(self.scene.get(name, "joint")), self.scene.get(name, "range")
        return abs(position) < OPEN_FRACTION * float(np.abs(limits).max())

    def _door_of(self, region: str) -> str | None:
        """The region or fixture whose part is in the way of a region while it is closed."""
        scene = self.scene
        names = [key.removesuffix("_joint") for key in scene.keys if key.endswith("_joint")]
        return next((name for name in names if f"{region}_".startswith(f"{name}_")), None)

    def _stay(self, gripper: float) -> Target:
        return Target(self.scene.hand, self.scene.hand_mat, gripper)

    # ------------------------------------------------------------------------------------------- pick and place
    def _pick_and_place(self, kind: str, name: str, where: str) -> Target:
        memory, scene = self._memory, self.scene
        if memory.releasing:
            return self._release()
        in_hand = scene.hand_mat.T @ (scene.pos(name) - scene.hand)
        if memory.held_at is not None and float(np.linalg.norm(in_hand - memory.held_at)) > SLIP:
            self._memory = memory = Memory()
        if memory.held_at is None and not memory.closing and scene.grasped(name) and scene.gap < OPEN_GAP:
            memory.closing = CLOSE_STEPS  # a policy has grasped it
        if memory.held_at is None and memory.closing >= CLOSE_STEPS and self._settled and scene.touched(name):
            memory.held_at, memory.tilt = in_hand, math.acos(np.clip(-scene.hand_mat[2, 2], -1.0, 1.0))
        return self._reach(name) if memory.held_at is None else self._carry(kind, name, where)

    def _reach(self, name: str) -> Target:
        """Move over the object, descend and close the fingers."""
        memory, scene = self._memory, self.scene
        if memory.closing:
            return self._close(name)
        if not self._fingers_free():
            return self._stay(OPEN)
        position = scene.pos(name)
        if memory.grasp is None or float(np.linalg.norm(position - memory.grasp_of)) > 0.01:
            self._plan_grasp(name)
        grasp = memory.grasp
        if grasp is None:
            return self._stay(OPEN)
        goal = grasp.position + self._offset
        mat = self._pointing(grasp.yaw, goal, grasp.tilt)
        if grasp.tilt and scene.hand[2] > goal[2] + ALIGNED and self._still < STILL_STEPS:
            return self._approach_along_axis(goal, mat)
        error = goal - scene.hand
        distance, turn = float(np.hypot(error[0], error[1])), abs(self._turn_to(grasp.yaw))
        descends = scene.hand[2] < goal[2] + 0.6 * HOVER
        if distance < REACHED and turn < TURNED and (-error[2] < REACHED or self._still >= STILL_STEPS):
            memory.closing = 1
            return self._close(name)
        if distance < (2 * ALIGNED if descends else ALIGNED) and turn < 1.5 * TURNED:
            return Target(goal, mat, OPEN)
        return self._travel(goal + [0.0, 0.0, HOVER], mat, OPEN, below=0.0)

    def _approach_along_axis(self, goal: np.ndarray, mat: np.ndarray) -> Target:
        """Move above a grasp with a tilted hand, then along the axis of the hand, which is free of obstacles."""
        memory, scene = self._memory, self.scene
        assert memory.heights is not None
        back = mat[:, 2] / mat[2, 2]  # per meter of height
        top = memory.heights.highest_on_way(goal[:2], goal[:2], _HAND_RADIUS)
        above = goal + back * max(HOVER, top + grasps.TIP + MARGIN - goal[2])
        height = min(float(scene.hand[2]), float(above[2]))
        turn = float(np.linalg.norm(rotation_vector(mat @ scene.hand_mat.T)))
        aside = float(np.linalg.norm((goal + back * (height - goal[2]) - scene.hand)[:2]))
        if aside > 2 * MARGIN:
            return self._travel(above, mat, OPEN, below=0.0)
        lower = STEP_SIZE if turn < 2 * TURNED and aside < 2 * ALIGNED else 0.0
        return Target(goal + back * max(0.0, height - lower - goal[2]), mat, OPEN)

    def _close(self, name: str) -> Target:
        memory = self._memory
        grasp = memory.grasp
        memory.closing += 1
        if memory.closing > GIVE_UP_STEPS + self.config.gripper_shift:
            if grasp is not None:
                self._avoid.setdefault(name, []).append(grasp)
            self._memory = Memory()
            return self._stay(OPEN)
        closes = memory.closing > self.config.gripper_shift + 1
        if grasp is None:
            return self._stay(CLOSE)
        goal = grasp.position + self._offset
        return Target(goal, self._pointing(grasp.yaw, goal, grasp.tilt), CLOSE if closes else OPEN)

    def _fingers_free(self) -> bool:
        """Whether the fingers are open, or open as far as they get."""
        return self.scene.gap > OPEN_GAP or self._still >= 2 * STILL_STEPS

    def _plan_grasp(self, name: str) -> None:
        memory, scene = self._memory, self.scene
        position, mat = scene.pos(name), scene.mat(name)
        yaw = yaw_of_body(mat)
        upright = pointing_up(-yaw) @ mat
        points = scene.get(name, "points")
        com = (upright @ (scene.get(name, "com") if scene.has(f"{name}_com") else points.mean(axis=0)))[:2]
        candidates = candidates_of(points @ upright.T, com)
        others = scene.others(name)
        memory.grasp = plan_grasp(candidates, position, yaw, others, scene.base, self._avoid.get(name, ()))
        memory.grasp_of = position
        memory.heights = HeightMap(np.concatenate([others, scene.points(name)]), self._floor())

    def _floor(self) -> float:
        """Height of the table: of the lowest point of any object."""
        scene = self.scene
        return min(float(scene.points(name)[:, 2].min()) for name in scene.bodies)

    def _pointing(self, yaw: float, goal: np.ndarray, least: float = 0.0) -> np.ndarray:
        """Orientation [3, 3] of a hand that points down, or away from the robot where it would not reach the goal.

        Args:
            yaw: of the fingers, about whose axis the hand tilts.
            goal: position [3].
            least: tilt in radians if the goal is within reach.
        """
        down = pointing_down(yaw)
        outward = (goal - self.scene.base)[:2] / np.linalg.norm((goal - self.scene.base)[:2])
        tilt = max(least, grasps.reaching_tilt(goal, self.scene.base)) * float(down[:2, 1] @ outward)
        return down @ about_x(tilt)

    def _turn_to(self, yaw: float) -> float:
        """Turn of the hand in radians to a yaw of its fingers."""
        x = self.scene.hand_mat[:, 0]
        return wrapped(yaw - math.atan2(x[1], x[0]), 2 * math.pi)

    def _travel(self, goal: np.ndarray, mat: np.ndarray, gripper: float, *, below: float) -> Target:
        """Move to a goal above all obstacles on the way.

        Args:
            goal: position [3].
            mat: orientation [3, 3].
            gripper: its action.
            below: meters from the grip site down to the lowest point of a held object.
        """
        memory, scene = self._memory, self.scene
        assert memory.heights is not None
        top = memory.heights.highest_on_way(scene.hand[:2], goal[:2], _HAND_RADIUS)
        height = max(goal[2], top + max(below, grasps.TIP) + MARGIN)
        far = float(np.linalg.norm(goal[:2] - scene.hand[:2])) > 2 * MARGIN
        if far and scene.hand[2] < height - 0.5 * MARGIN:
            return Target(np.append(scene.hand[:2], height + 0.01), scene.hand_mat, gripper)
        return Target(np.append(goal[:2], height), mat, gripper)

    def _carry(self, kind: str, name: str, where: str) -> Target:
        """Lift the held object, move it over its destination, lower it."""
        memory, scene = self._memory, self.scene
        if kind == "on" and self._drags(where):
            return self._drag(name, where)
        moved = memory.placed_on is None or float(np.linalg.norm(scene.pos(where) - memory.placed_on)) > 0.01
        if moved and not memory.lowering:
            self._plan_placement(kind, name, where)
        placement = memory.placement
        assert placement is not None
        goal = placement.origin - (scene.pos(name) - scene.hand)[:2]
        distance = float(np.linalg.norm(goal - scene.hand[:2]))
        turn = abs(self._turn_to(memory.place_yaw))
        mat = self._pointing(memory.place_yaw, np.append(goal, placement.height), memory.tilt)
        if distance < (3 * ALIGNED if memory.lowering else ALIGNED) and turn < 1.5 * TURNED:
            memory.lowering = True
            if scene.hand[2] - placement.height < REACHED or self._still >= STILL_STEPS:
                memory.releasing = 1
                return self._release()
            return Target(np.append(goal, placement.height + 0.003), mat, CLOSE)
        memory.lowering = False
        aside = self._out_of_overhang(name)
        if aside is not None:
            return Target(scene.hand + np.append(0.04 * aside, 0.02), scene.hand_mat, CLOSE)
        bottom = float(scene.hand[2] - scene.points(name)[:, 2].min())
        return self._travel(np.append(goal, placement.height + 2 * MARGIN), mat, CLOSE, below=bottom + MARGIN)

    def _drags(self, where: str) -> bool:
        """Whether a held object would slip if it were lifted, and need not be: its destination is on the table."""
        grasp, scene = self._memory.grasp, self.scene
        on_table = scene.has(f"{where}_size") and scene.pos(where)[2] < self._floor() + MARGIN
        return grasp is not None and grasp.slips and on_table

    def _drag(self, name: str, where: str) -> Target:
        """Pull a held object over the table to the middle of a region."""
        scene = self.scene
        goal = scene.hand + scene.pos(where) - scene.pos(name)
        return Target(np.append(goal[:2], scene.hand[2]), scene.hand_mat, CLOSE)

    def _out_of_overhang(self, name: str) -> np.ndarray | None:
        """Horizontal direction [2] that frees a held object from an overhang; None if there is none above it."""
        scene = self.scene
        points, others = scene.points(name), scene.others(name)
        low, high = points.min(axis=0), points.max(axis=0)
        inside = ((others[:, :2] > low[:2] + 0.01) & (others[:, :2] < high[:2] - 0.01)).all(axis=1)
        over = others[inside & (others[:, 2] > high[2]) & (others[:, 2] < high[2] + OVERHANG)]
        if not len(over):
            return None
        way = 0.5 * (low + high)[:2] - over[:, :2].mean(axis=0)
        if float(np.linalg.norm(way)) < 0.01:  # all of it is covered
            way = (scene.base - scene.hand)[:2]
        return way / float(np.linalg.norm(way))

    def _plan_placement(self, kind: str, name: str, where: str) -> None:
        memory, scene = self._memory, self.scene
        others = scene.others(name)
        memory.heights = HeightMap(others, self._floor())
        held = scene.points(name) - scene.hand
        x = scene.hand_mat[:, 0]
        yaw = math.atan2(x[1], x[0])
        turns = np.arange(-8, 9) * math.pi / 16
        turns = turns[np.abs(yaw + turns - HOME_YAW) < 0.6 * math.pi]
        origin = (scene.pos(name) - scene.hand)[:2]
        spots = self._spots(kind, where)
        memory.placement = plan_placement(held, origin, yaw, spots=spots, turns=turns, heights=memory.heights)
        memory.place_yaw, memory.placed_on = yaw + memory.placement.turn, scene.pos(where)

    def _spots(self, kind: str, where: str) -> np.ndarray:
        """Positions [K, 2] for an object's origin that satisfy `on` or `in`; the middle first."""
        scene = self.scene
        center = scene.pos(where)[:2]
        if not scene.has(f"{where}_size"):  # an object: within 3 cm of its origin
            half = np.full(2, 0.015)
        elif kind == "in":
            half = np.abs(scene.mat(where) @ scene.get(where, "size"))[:2] - 0.012
        else:
            half = np.abs(scene.get(where, "size")[:2]) - 0.015
        half = np.clip(half, 0.0, 0.08)
        ticks = [np.linspace(-h, h, 13) for h in half]
        offsets = np.stack(np.meshgrid(*ticks), axis=-1).reshape(-1, 2)
        offsets = offsets[np.argsort(np.linalg.norm(offsets, axis=1), kind="stable")]
        if kind == "on" and scene.has(f"{where}_size"):
            offsets = offsets @ scene.mat(where)[:2, :2].T
        return center + offsets

    def _release(self) -> Target:
        """Open the fingers, then rise."""
        memory, scene = self._memory, self.scene
        memory.releasing += 1
        shift = self.config.gripper_shift
        if memory.releasing <= shift + 1:
            return self._stay(CLOSE)
        if scene.gap < OPEN_GAP and memory.releasing <= OPEN_STEPS + shift:
            return self._stay(OPEN)
        if memory.released_at is None:
            memory.released_at = scene.hand
        if scene.hand[2] > memory.released_at[2] + HOVER or memory.releasing > OPEN_STEPS + 20:
            self._memory = Memory()
        return Target(scene.hand + [0.0, 0.0, 0.04], scene.hand_mat, OPEN)

    # ------------------------------------------------------------------------------- drawers, doors and knobs
    def _open(self, name: str) -> Target:
        """Pinch the handle from the front with a horizontal hand and pull."""
        memory, scene = self._memory, self.scene
        memory.opening = True
        out, handle, mat = self._handle(name)
        if memory.releasing:
            return self._let_go(out)
        if scene.get(name, "is_open"):
            memory.releasing = 1
            return self._let_go(out)
        error = handle - scene.hand
        aside = float(np.linalg.norm(error - (error @ out) * out))
        if memory.closing:
            memory.closing += 1
            if memory.closing <= CLOSE_STEPS + 5:
                return Target(handle, mat, CLOSE)
            if scene.gap < 0.003 or aside > 0.03 or self._still > 2 * STILL_STEPS:  # it slipped
                self._memory = Memory(releasing=1, opening=True)
            return Target(handle + 0.06 * out, mat, CLOSE)
        turn = float(np.linalg.norm(rotation_vector(mat @ scene.hand_mat.T)))
        if aside < 0.01 and turn < 0.15 and (abs(error @ out) < REACHED or self._still >= STILL_STEPS):
            memory.closing = 1
        if aside < (0.02 if -(error @ out) < 0.08 else ALIGNED) and turn < 0.2:
            return Target(handle, mat, OPEN)
        return self._approach(handle + 0.1 * out, mat, pointing_down(HOME_YAW), OPEN)

    def _handle(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Direction in which a drawer opens, middle of its handle, orientation of a hand that pinches it."""
        scene = self.scene
        low, high = scene.get(name, "range")
        out = scene.get(name, "axis") * (1.0 if abs(high) > abs(low) else -1.0)
        points = scene.points(f"{name}_part")
        front = points[points @ out > (points @ out).max() - 0.012]
        middle = 0.5 * (front.min(axis=0) + front.max(axis=0))
        return out, middle, horizontal(-out, scene.hand_mat)

    def _approach(self, goal: np.ndarray, mat: np.ndarray, down: np.ndarray, gripper: float) -> Target:
        """Move to a place in front of a fixture: straight where nothing is in the way, else from above."""
        memory, scene = self._memory, self.scene
        if memory.heights is None:
            memory.heights = HeightMap(scene.others(""), self._floor())
        top = memory.heights.highest_on_way(scene.hand[:2], goal[:2], _HAND_RADIUS)
        if top + grasps.HAND_HALF_LENGTH < min(goal[2], scene.hand[2]):
            return Target(goal, mat, gripper)
        distance = float(np.linalg.norm((goal - scene.hand)[:2]))
        memory.fronted = distance < (0.12 if memory.fronted else 0.03)
        if memory.fronted:
            return Target(goal, mat, gripper)
        return self._travel(goal + [0.0, 0.0, 0.05], down, gripper, below=0.0)

    def _let_go(self, out: np.ndarray) -> Target:
        """Open the fingers, draw the hand back and rise."""
        memory, scene = self._memory, self.scene
        memory.releasing += 1
        if scene.gap < OPEN_GAP and memory.releasing <= OPEN_STEPS:
            return self._stay(OPEN)
        if memory.released_at is None:
            memory.released_at = scene.hand
        gone = float((scene.hand - memory.released_at) @ out)
        if gone > 0.06 or memory.releasing > OPEN_STEPS + 15:
            self._memory = Memory()
        return Target(scene.hand + 0.05 * out, scene.hand_mat, OPEN)

    def _close_part(self, name: str) -> Target:
        """Push a drawer or a door shut with closed fingers."""
        scene = self.scene
        slides = bool(scene.get(name, "slides"))
        if slides:
            out, contact, _ = self._handle(name)
            way = -out
            top = self._protruding(f"{name}_part") if self._memory.pressed < MAX_PRESS_STEPS else None
            if top is not None and not self._memory.pushing:
                self._memory.pressed += 1
                return self._press(top, way)
        else:
            contact, way = self._door_contact(name)
        down = pointing_down(yaw_across(way))
        mat = down @ about_x(PUSH_TILT * float(down[:, 1] @ way)) if slides else down
        error = contact - scene.hand
        behind = float(error @ way)
        aside = float(np.linalg.norm(error - behind * way))
        turn = float(np.linalg.norm(rotation_vector(mat @ scene.hand_mat.T)))
        started = self._memory.pushing
        self._memory.pushing = -0.05 < behind < 0.15 and aside < (0.06 if started else 0.03) and (started or turn < 0.3)
        if self._memory.pushing:
            return Target(contact + 0.05 * way, mat, CLOSE)
        return self._approach(contact - 0.09 * way, mat, down, CLOSE)

    def _protruding(self, part: str) -> np.ndarray | None:
        """Where to press on an object [3] that protrudes above the rim of a drawer; None if none does.

        Its highest point, moved inwards by a tenth of the way to its middle.
        """
        scene = self.scene
        drawer = scene.points(part)
        low, high = drawer.min(axis=0), drawer.max(axis=0)
        place = None
        for name in scene.bodies:
            points = scene.points(name)
            middle = 0.5 * (points.min(axis=0) + points.max(axis=0))
            in_drawer = ((middle > low) & (middle < high + [0.0, 0.0, 0.03])).all()
            if not in_drawer or part.startswith(name):  # the fixture and the drawer itself
                continue
            top = points[points[:, 2].argmax()]
            if top[2] > high[2] + PROTRUSION and (place is None or top[2] > place[2]):
                place = top + np.append(0.1 * (middle - top)[:2], 0.0)
        return place

    def _press(self, place: np.ndarray, way: np.ndarray) -> Target:
        """Press an object down into a drawer with closed fingers, the closing axis perpendicular to its motion."""
        memory, scene = self._memory, self.scene
        if memory.heights is None:
            memory.heights = HeightMap(scene.others(""), self._floor())
        down = pointing_down(yaw_across(way))
        if float(np.linalg.norm((place - scene.hand)[:2])) < 2 * ALIGNED:
            return Target(place - [0.0, 0.0, STEP_SIZE], down, CLOSE)
        return self._travel(place + [0.0, 0.0, MARGIN], down, CLOSE, below=0.0)

    def _door_contact(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Where a door that turns about a vertical axis is pushed, and in which direction, to close it."""
        scene = self.scene
        axis, anchor = scene.get(name, "axis"), scene.get(name, "anchor")
        low, high = scene.get(name, "range")
        closing = axis * (-1.0 if abs(high) > abs(low) else 1.0)
        points = scene.points(f"{name}_part") - anchor
        radius = np.hypot(points[:, 0], points[:, 1])
        edge = points[radius > 0.8 * radius.max()].mean(axis=0)
        way = np.cross(closing, edge)
        way /= np.linalg.norm(way)
        near = points[np.abs(radius - 0.8 * radius.max()) < 0.02]
        back = float((near @ way).min())
        radial = np.array([edge[0], edge[1], 0.0]) / np.hypot(edge[0], edge[1])
        height = 0.5 * (near[:, 2].min() + near[:, 2].max())
        return anchor + 0.8 * radius.max() * radial + back * way + [0.0, 0.0, height], way

    def _turn(self, name: str, sign: float) -> Target:
        """Grasp a knob from above and turn the hand until the predicate holds."""
        memory, scene = self._memory, self.scene
        part = f"{name}_part"
        if memory.closing > CLOSE_STEPS + 6 and memory.grasp is not None:
            memory.closing += 1
            up = float(scene.get(name, "axis")[2])
            yaw = memory.turned_from + (float(scene.get(name, "joint")) - memory.joint_from) * up
            if scene.gap < 0.003 or memory.closing > 80:
                self._avoid.setdefault(part, []).append(memory.grasp)
                self._memory = Memory()
                return self._stay(OPEN)
            return Target(memory.grasp.position, pointing_down(yaw + 0.5 * sign * up), CLOSE)
        target = self._reach(part)
        if self._memory.grasp is not None:
            self._memory.turned_from = self._memory.grasp.yaw
            self._memory.joint_from = float(scene.get(name, "joint"))
        return target


def horizontal(forward: np.ndarray, hand_mat: np.ndarray) -> np.ndarray:
    """Orientation [3, 3] of a hand that points forward, its fingers above each other.

    Args:
        forward: horizontal direction [3].
        hand_mat: present orientation [3, 3]: of two such orientations the closer one is taken.
    """
    up = np.array([0.0, 0.0, 1.0])
    options = [np.stack([side * up, np.cross(forward, side * up), forward], axis=1) for side in (1.0, -1.0)]
    return max(options, key=lambda mat: float(np.trace(mat @ hand_mat.T)))


def about_x(angle: float) -> np.ndarray:
    """Rotation [3, 3] of a hand about the axis of its fingers, which takes its pointing direction to its y axis."""
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[1.0, 0.0, 0.0], [0.0, c, s], [0.0, -s, c]])


def yaw_across(way: np.ndarray) -> float:
    """Yaw of a hand, close to the home pose, whose closing axis is perpendicular to a horizontal direction."""
    return HOME_YAW + wrapped(math.atan2(way[1], way[0]) + math.pi / 2 - HOME_YAW, math.pi)


def pointing_up(yaw: float) -> np.ndarray:
    """Rotation matrix [3, 3] about the vertical axis."""
    c, s = math.cos(yaw), math.sin(yaw)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def yaw_of_body(mat: np.ndarray) -> float:
    """Turn about the vertical axis of the body's most horizontal axis."""
    axis = mat[:, int(np.argmin(np.abs(mat[2])))]
    return math.atan2(axis[1], axis[0])

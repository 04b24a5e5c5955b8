"""Tasks in the plane, seen from above, on which defaults may be tuned: `ring_push` and `key_door`.

`ring_push`: push the named puck into the ring, often past the other one; contact is unstable and the ring is narrow.
`key_door`: fetch the named key and bring it to the goal behind a wall, through the door. `benchmarks/suites/unseen.py`
has tasks on which nothing may be tuned. Positions lie in [-1, 1] (x right, y up); an action is a velocity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions, check_init_state_id, task_of
from rlvla.envs.chunks import SUCCESS_REWARD, ChunkRunner
from rlvla.envs.experts.base import ExpertConfig, disturb, draw_offset
from rlvla.envs.options import SuiteOptions
from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.toy_push.expert import displacement
from rlvla.envs.toy_push.physics import NUMBERS, OBJECT_RADIUS, PUSHER_RADIUS, push

CAMERAS = ("top",)
Color = tuple[int, int, int]
TABLE, DARK, RED = (205, 208, 214), (25, 25, 25), (200, 30, 40)
OBJECTS: dict[str, Color] = {"orange": (240, 130, 30), "purple": (130, 60, 170)}
EFFECTOR = 0.09  # radius of the effector's marker


class Canvas:
    """A square image of the plane; shapes are anti-aliased.

    Args:
        size: height and width in pixels.
    """

    def __init__(self, size: int):
        line = (np.arange(size) + 0.5) / size * 2 - 1
        self._x, self._y, self._scale = line[None, :], -line[:, None], size / 2
        self.image = np.full((size, size, 3), TABLE, np.float64)

    def disc(self, center: Any, radius: float, color: Color) -> None:
        """Draw a disc."""
        self._paint(radius - self._distance(center), color)

    def ring(self, center: Any, radius: float, color: Color, width: float = 0.03) -> None:
        """Draw a circle of a line `2 * width` wide."""
        self._paint(width - abs(self._distance(center) - radius), color)

    def box(self, center: Any, half: tuple[float, float], color: Color, angle: float = 0.0) -> None:
        """Draw a rectangle of half sides `half`, rotated counterclockwise by `angle` radians."""
        dx, dy, c, s = self._x - center[0], self._y - center[1], np.cos(angle), np.sin(angle)
        self._paint(np.minimum(half[0] - abs(c * dx + s * dy), half[1] - abs(c * dy - s * dx)), color)

    def _distance(self, center: Any) -> np.ndarray:
        return np.hypot(self._x - center[0], self._y - center[1])

    def _paint(self, inside: np.ndarray, color: Color) -> None:
        """Blend in the points with a positive signed distance."""
        self.image += np.clip(inside * self._scale + 0.5, 0, 1)[:, :, None] * (np.array(color) - self.image)


class PlanarTask:
    """State and rules of a task; subclasses define everything but `reset`.

    Args:
        task_id: index into `texts`.

    Attributes:
        texts: instruction of each task, by name.
        action_dim, proprio_dim: sizes of an action and of `proprio`.
    """

    texts: ClassVar[Mapping[str, str]]
    action_dim: ClassVar[int] = 2
    proprio_dim: ClassVar[int] = 2

    def __init__(self, task_id: int):
        self.task_id = task_id
        self.effector = np.zeros(2)

    def reset(self, rng: np.random.Generator) -> None:
        """Draw an initial state."""
        raise NotImplementedError

    def advance(self, action: np.ndarray) -> bool:
        """Execute an action in [-1, 1]; whether the task is solved afterwards."""
        raise NotImplementedError

    def draw(self, canvas: Canvas) -> None:
        """Draw the state."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """The privileged state that `expert` reads."""
        raise NotImplementedError

    @staticmethod
    def expert(state: Mapping[str, np.ndarray], offset: np.ndarray) -> np.ndarray:
        """The expert's action, aiming `offset` beside its target."""
        raise NotImplementedError

    def proprio(self) -> np.ndarray:
        """Proprioception; by default the position of the effector."""
        return self.effector


def toward(start: np.ndarray, goal: np.ndarray, step: float) -> np.ndarray:
    """Velocity in [-1, 1] from `start` to `goal` with at most `step` per axis, in a straight line."""
    way = (goal - start) / step
    return way / max(1.0, float(abs(way).max()))


def apart(rng: np.random.Generator, number: int, distance: float, low: Any = -0.8, high: Any = 0.8) -> np.ndarray:
    """[number, 2]: random positions between `low` and `high`, at least `distance` from each other."""
    while True:
        positions = rng.uniform(low, high, (number, 2))
        gaps = np.linalg.norm(positions[:, None] - positions[None], axis=-1) + 9 * np.eye(number)
        if gaps.min() >= distance:
            return positions


@dataclass(frozen=True)
class PlanarOptions(SuiteOptions):
    """Options of the suites."""

    known_cameras: ClassVar[tuple[str, ...]] = CAMERAS
    needs_camera: ClassVar[bool] = True
    smallest_image: ClassVar[int] = 32

    cameras: tuple[str, ...] = CAMERAS
    max_steps: int = 60
    success_hold_steps: int = 2


class PlanarEnv:
    """An environment of the contract `rlvla.envs.base.Env`."""

    def __init__(self, spec: TaskSpec, scene: PlanarTask, options: PlanarOptions):
        self.task, self._scene, self._options = spec, scene, options
        self._runner = ChunkRunner(spec.max_steps, options.success_hold_steps)

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode; the dynamics are deterministic, so `seed` has no effect."""
        check_init_state_id(self.task, init_state_id)
        self._scene.reset(np.random.default_rng([9041, init_state_id]))
        self._runner.begin()
        return self._observe()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D]."""
        actions = check_actions(actions, self.task.action_dim)
        return self._runner.play(actions, self._advance, self._observe, self._draw if record_frames else None)

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        return bool(self._scene.advance(np.clip(action.astype(np.float64), -1, 1))), frozenset()

    def privileged_state(self) -> dict[str, np.ndarray]:
        """See `PlanarTask.state`."""
        return {name: np.array(value, np.float64) for name, value in self._scene.state().items()}

    def close(self) -> None:
        """Close the environment."""
        self._runner.end()

    def _draw(self) -> np.ndarray:
        canvas = Canvas(self._options.image_size)
        self._scene.draw(canvas)
        return canvas.image.astype(np.uint8)

    def _observe(self) -> Observation:
        proprio = np.array(self._scene.proprio(), np.float32) if self._options.use_proprio else None
        return Observation(self._draw()[None], proprio, self.task.instruction)


class PlanarExpert:
    """Plays `PlanarTask.expert` with the deviations of an `ExpertConfig`."""

    def __init__(self, scene: type[PlanarTask], config: ExpertConfig):
        self._scene, self._config = scene, config

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode."""
        self._rng, self._offset = rng, draw_offset(self._config, rng)

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Action [D]."""
        return disturb(self._scene.expert(state, self._offset), slice(0, 2), self._config, self._rng)


def register_planar_suite(name: str, scene: type[PlanarTask], options_class: type[Any] = PlanarOptions) -> None:
    """Register a suite with one task for each of `scene.texts`; `options_class`: a dataclass like `PlanarOptions`."""

    def list_tasks(**kw: Any) -> list[TaskSpec]:
        options = options_class(**kw)
        return [
            TaskSpec(
                suite=name,
                task_id=task_id,
                name=task,
                instruction=text,
                max_steps=options.max_steps,
                num_init_states=10_000,
                action_dim=scene.action_dim,
                proprio_dim=scene.proprio_dim,
                control_freq=10.0,
                reward_range=SUCCESS_REWARD,
            )
            for task_id, (task, text) in enumerate(scene.texts.items())
        ]

    def make(task_id: int, **kw: Any) -> PlanarEnv:
        return PlanarEnv(task_of(name, list_tasks(**kw), task_id), scene(task_id), options_class(**kw))

    def expert(task: TaskSpec, config: ExpertConfig) -> PlanarExpert:
        return PlanarExpert(scene, config)

    register_suite(name, Suite(list_tasks, make, cameras=CAMERAS, options=options_class, expert=expert))


class RingPush(PlanarTask):
    """Two pucks, a ring, and a pusher without grip; the physics of `toy_push`."""

    texts = {color: f"push the {color} puck into the ring" for color in OBJECTS}
    _RING = 0.07  # largest distance of the centers

    def reset(self, rng: np.random.Generator) -> None:
        """See `PlanarTask`."""
        limit = 1 - OBJECT_RADIUS - 0.15
        while True:
            self._ring, *pucks = apart(rng, 3, 2 * OBJECT_RADIUS + 0.06, -limit, limit)
            self.effector = rng.uniform(-limit, limit, 2)
            if min(np.linalg.norm(self.effector - puck) for puck in pucks) >= OBJECT_RADIUS + PUSHER_RADIUS + 0.02:
                break
        self._pucks = np.array(pucks)

    def advance(self, action: np.ndarray) -> bool:
        """See `PlanarTask`."""
        dx, dy = (0.08 * action).tolist()
        positions = (*self.effector.tolist(), *self._pucks.flatten().tolist())
        moved = np.reshape(push(positions, dx, dy, NUMBERS), (3, 2))
        self.effector, self._pucks = moved[0], moved[1:]
        return np.linalg.norm(self._pucks[self.task_id] - self._ring) <= self._RING

    def draw(self, canvas: Canvas) -> None:
        """See `PlanarTask`."""
        canvas.ring(self._ring, OBJECT_RADIUS + 0.05, DARK)
        for center, color in zip(self._pucks, OBJECTS.values()):
            canvas.disc(center, OBJECT_RADIUS, color)
        canvas.disc(self.effector, PUSHER_RADIUS, DARK)

    def state(self) -> dict[str, np.ndarray]:
        """See `PlanarTask`."""
        named, other = self._pucks[self.task_id], self._pucks[1 - self.task_id]
        return {"effector": self.effector, "puck": named, "other": other, "ring": self._ring}

    @staticmethod
    def expert(state: Mapping[str, np.ndarray], offset: np.ndarray) -> np.ndarray:
        """Around the puck to its far side, then push, past the other puck."""
        effector, puck, other, ring = (complex(*state[name]) for name in ("effector", "puck", "other", "ring"))
        way = displacement(effector, puck, other, ring + complex(*offset)) / 0.08
        way /= max(1.0, abs(way.real), abs(way.imag))
        return np.array([way.real, way.imag])


class KeyDoor(PlanarTask):
    """Two keys on the left, a wall with a door, and a goal on the right; the closed gripper carries a key."""

    texts = {color: f"bring the {color} key through the door to the goal" for color in OBJECTS}
    action_dim, proprio_dim = 3, 3
    _STEP, _GRASP, _HALF_DOOR, _THICK, _THERE = 0.1, 0.08, 0.16, 0.05, 0.1

    def reset(self, rng: np.random.Generator) -> None:
        """See `PlanarTask`."""
        positions = apart(rng, 3, 0.35, (-0.85, -0.8), (-0.3, 0.8))
        self.effector, self._keys = positions[0], positions[1:]
        self._wall = np.array([rng.uniform(-0.05, 0.2), rng.uniform(-0.65, 0.65)])  # x of the wall, y of its door
        self._goal = np.array([rng.uniform(0.55, 0.85), rng.uniform(-0.8, 0.8)])
        self._closed, self._carried = False, -1

    def advance(self, action: np.ndarray) -> bool:
        """See `PlanarTask`."""
        x, y = before = self.effector
        self.effector = np.clip(before + self._STEP * action[:2], -1, 1)
        wall, door = self._wall
        if abs(self.effector[1] - door) > self._HALF_DOOR and abs(self.effector[0] - wall) < self._THICK + 0.02:
            inside = abs(x - wall) < self._THICK + 0.02  # in the door: it stops at the frame
            self.effector = np.array([self.effector[0], y]) if inside else np.array([x, self.effector[1]])
        if (x - wall) * (self.effector[0] - wall) < 0 and abs(self.effector[1] - door) > self._HALF_DOOR:
            self.effector = before
        closes = bool(action[2] > 0)
        if closes and not self._closed:
            near = np.linalg.norm(self._keys - self.effector, axis=1)
            self._carried = int(near.argmin()) if near.min() <= self._GRASP else -1
        elif not closes:
            self._carried = -1
        self._closed = closes
        if self._carried >= 0:
            self._keys[self._carried] = self.effector
        return np.linalg.norm(self._keys[self.task_id] - self._goal) <= self._THERE and self._carried < 0

    def draw(self, canvas: Canvas) -> None:
        """See `PlanarTask`."""
        wall, door = self._wall
        for side in (-1, 1):
            canvas.box((wall, door + side * (self._HALF_DOOR + 1)), (self._THICK, 1.0), (120, 110, 100))
        canvas.ring(self._goal, 0.15, (60, 150, 80), width=0.05)
        for center, color in zip(self._keys, OBJECTS.values()):
            canvas.box(center, (0.1, 0.05), color)
        canvas.ring(self.effector, EFFECTOR, RED if self._closed else DARK)

    def state(self) -> dict[str, np.ndarray]:
        """See `PlanarTask`."""
        carrying = self._carried == self.task_id
        key = self._keys[self.task_id]
        return {"effector": self.effector, "key": key, "wall": self._wall, "goal": self._goal, "carrying": carrying}

    @staticmethod
    def expert(state: Mapping[str, np.ndarray], offset: np.ndarray) -> np.ndarray:
        """To the key, close, to the door, through it, to the goal, open."""
        effector, (wall, door), carrying = state["effector"], state["wall"], bool(state["carrying"])
        if not carrying:
            if np.linalg.norm(state["key"] - state["goal"]) <= KeyDoor._THERE:
                return np.array([0.0, 0.0, -1.0])
            there = np.linalg.norm(state["key"] - effector) <= 0.04
            return np.array([*toward(effector, state["key"], KeyDoor._STEP), 1.0 if there else -1.0])
        goal = state["goal"] + offset
        if effector[0] < wall + 0.1:
            aligned = abs(effector[1] - door) <= 0.08
            goal = np.array([wall + 0.15 if aligned else wall - 0.12, door])
        there = np.linalg.norm(state["goal"] + offset - effector) <= 0.05
        return np.array([*toward(effector, goal, KeyDoor._STEP), -1.0 if there else 1.0])

    def proprio(self) -> np.ndarray:
        """Position and gripper."""
        return np.array([*self.effector, self._closed])


register_planar_suite("ring_push", RingPush)
register_planar_suite("key_door", KeyDoor)

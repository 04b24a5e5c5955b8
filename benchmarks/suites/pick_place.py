"""`pick_place`: carry the named object to the named pad in the plane, with a gripper that opens and closes.

The defaults of `recipes/own_task.yaml` were not chosen on this suite; `benchmarks/learning.py` runs the recipe on it as
on an environment of a user's own. Two square objects (orange, purple), two round pads (white, green) and the gripper, a
ring that is dark when open and red when closed. The gripper carries an object once it closes within 0.07 of its center.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions, check_init_state_id, task_of
from rlvla.envs.chunks import SUCCESS_REWARD, ChunkRunner
from rlvla.envs.experts.base import ExpertConfig, disturb, draw_offset
from rlvla.envs.options import SuiteOptions
from rlvla.envs.registry import Suite, register_suite

OBJECTS = {"orange": (240, 130, 30), "purple": (130, 60, 170)}
PADS = {"white": (250, 250, 250), "green": (60, 150, 80)}
CAMERAS = ("top",)
STEP_SIZE = 0.1
_OBJECT, _PAD, _RING = 0.1, 0.17, 0.09  # half sides and radii
_GRASP, _PLACED = 0.07, 0.1
_APART = 0.42
_BACKGROUND, _OPEN, _CLOSED = (205, 208, 214), (25, 25, 25), (200, 30, 40)


def initial_positions(init_state_id: int) -> np.ndarray:
    """[5, 2]: the gripper, two objects and two pads, apart from each other."""
    rng = np.random.default_rng([9041, init_state_id])
    while True:
        positions = rng.uniform(-0.8, 0.8, (5, 2))
        distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1) + 9 * np.eye(5)
        if distances[1:, 1:].min() >= _APART:
            return positions


class PickPlace:
    """The environment; see the module's docstring."""

    def __init__(self, task: TaskSpec, options: PickPlaceOptions):
        self.task, self._options = task, options
        self._runner = ChunkRunner(task.max_steps, options.success_hold_steps)
        self._object, self._pad = divmod(task.task_id, len(PADS))
        self._closed, self._carried = False, -1
        self._positions = np.zeros((5, 2))
        line = (np.arange(options.image_size) + 0.5) / options.image_size * 2 - 1
        self._x, self._y = line[None, :], -line[:, None]

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode."""
        check_init_state_id(self.task, init_state_id)
        self._positions = initial_positions(init_state_id)
        self._closed, self._carried = False, -1
        self._runner.begin()
        return self._observe()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, 3]."""
        actions = check_actions(actions, self.task.action_dim)
        frame = self._draw if record_frames else None
        return self._runner.play(actions, self._advance, self._observe, frame)

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        gripper, objects = self._positions[0], self._positions[1:3]
        gripper += STEP_SIZE * np.clip(action[:2], -1, 1)
        np.clip(gripper, -1, 1, out=gripper)
        closes = bool(action[2] > 0)
        if closes and not self._closed:
            near = np.linalg.norm(objects - gripper, axis=1)
            self._carried = int(near.argmin()) if near.min() <= _GRASP else -1
        elif not closes:
            self._carried = -1
        self._closed = closes
        if self._carried >= 0:
            objects[self._carried] = gripper
        placed = np.linalg.norm(objects[self._object] - self._positions[3 + self._pad]) <= _PLACED
        return bool(placed and self._carried < 0), frozenset()

    def privileged_state(self) -> dict[str, np.ndarray]:
        """What the expert sees."""
        return {
            "gripper": self._positions[0].copy(),
            "object": self._positions[1 + self._object].copy(),
            "pad": self._positions[3 + self._pad].copy(),
            "carrying": np.array([self._carried == self._object]),
        }

    def close(self) -> None:
        """Close the environment."""
        self._runner.end()

    def _draw(self) -> np.ndarray:
        size = self._options.image_size
        image = np.full((size, size, 3), _BACKGROUND, np.float64)
        gripper, *others = self._positions
        for center, color in zip(others[2:], PADS.values()):
            self._paint(image, _PAD - np.hypot(self._x - center[0], self._y - center[1]), color)
        for center, color in zip(others[:2], OBJECTS.values()):
            self._paint(image, _OBJECT - np.maximum(abs(self._x - center[0]), abs(self._y - center[1])), color)
        ring = 0.03 - abs(np.hypot(self._x - gripper[0], self._y - gripper[1]) - _RING)
        self._paint(image, ring, _CLOSED if self._closed else _OPEN)
        return image.astype(np.uint8)

    def _paint(self, image: np.ndarray, inside: np.ndarray, color: tuple[int, int, int]) -> None:
        """Blend in what lies inside (a signed distance in table units), anti-aliased."""
        coverage = np.clip(inside * image.shape[0] / 2 + 0.5, 0, 1)[:, :, None]
        image += coverage * (np.array(color) - image)

    def _observe(self) -> Observation:
        proprio = (
            np.array([*self._positions[0], float(self._closed)], np.float32) if self._options.use_proprio else None
        )
        return Observation(self._draw()[None], proprio, self.task.instruction)


class PickPlaceExpert:
    """To the object, close, to the pad (plus the episode's offset), open."""

    def __init__(self, config: ExpertConfig):
        self._config = config

    def reset(self, rng: np.random.Generator) -> None:
        """Start an episode."""
        self._rng, self._offset = rng, draw_offset(self._config, rng)

    def act(self, state: dict[str, np.ndarray]) -> np.ndarray:
        """Action [3]."""
        carrying = bool(state["carrying"][0])
        if not carrying and np.linalg.norm(state["object"] - state["pad"]) <= _PLACED:
            return np.array([0.0, 0.0, -1.0], np.float32)
        goal = state["pad"] + self._offset if carrying else state["object"]
        way = (goal - state["gripper"]) / STEP_SIZE
        there = np.linalg.norm(way) * STEP_SIZE <= 0.04
        way /= max(1.0, abs(way).max())
        closed = there if not carrying else not there
        return disturb(np.array([*way, 1.0 if closed else -1.0]), slice(0, 2), self._config, self._rng)


@dataclass(frozen=True)
class PickPlaceOptions(SuiteOptions):
    """Options of the suite."""

    known_cameras: ClassVar[tuple[str, ...]] = CAMERAS
    needs_camera: ClassVar[bool] = True
    smallest_image: ClassVar[int] = 32

    cameras: tuple[str, ...] = CAMERAS
    max_steps: int = 50
    success_hold_steps: int = 3


def list_tasks(**kw) -> list[TaskSpec]:
    options = PickPlaceOptions(**kw)
    return [
        TaskSpec(
            suite="pick_place",
            task_id=task_id,
            name=f"{color}_on_{pad}",
            instruction=f"put the {color} block on the {pad} pad",
            max_steps=options.max_steps,
            num_init_states=10_000,
            action_dim=3,
            proprio_dim=3,
            control_freq=10.0,
            reward_range=SUCCESS_REWARD,
        )
        for task_id, (color, pad) in enumerate((color, pad) for color in OBJECTS for pad in PADS)
    ]


def make(task_id: int, **kw) -> PickPlace:
    return PickPlace(task_of("pick_place", list_tasks(**kw), task_id), PickPlaceOptions(**kw))


register_suite(
    "pick_place",
    Suite(
        list_tasks=list_tasks,
        make=make,
        cameras=CAMERAS,
        options=PickPlaceOptions,
        expert=lambda task, config: PickPlaceExpert(config),
    ),
)

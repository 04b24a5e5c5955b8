"""`toy_push`: push the named disc into the named zone. Needs no simulator; drawn with numpy.

A red and a blue disc lie on a table [-1, 1] x [-1, 1] with walls (x right, y up), seen from above, with a green and a
yellow zone beyond them. The instruction names a disc and a zone. The pusher, a smaller disc, has to get behind the
named disc first, often around the other one, and contact is unstable: a disc that is not pushed through its center
slips away to the side, so the image matters all the way. Actions are velocities: a step moves the pusher by at most
`STEP_SIZE` in each direction. All tasks share their scenes, so that the instruction is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions, check_init_state_id, task_of
from rlvla.envs.chunks import SUCCESS_REWARD, ChunkRunner
from rlvla.envs.options import SuiteOptions
from rlvla.envs.toy_push.physics import CONTACT, NUMBERS, OBJECT_RADIUS, PUSHER_RADIUS, STEP_SIZE, Positions, push
from rlvla.envs.toy_reach.env import TABLE, VIEW, paint_disc
from rlvla.utils.cli.flags import arg

OBJECTS: dict[str, tuple[int, int, int]] = {"red": (214, 39, 40), "blue": (40, 80, 220)}
ZONES: dict[str, tuple[int, int, int]] = {"green": (96, 190, 110), "yellow": (245, 205, 60)}
CAMERAS = ("top",)
ZONE_SIZE = 0.2  # half the side of a zone
HOLD_STEPS = 3
# The discs that make up the pusher's marker: radius and color.
MARKER = ((PUSHER_RADIUS, (20, 20, 20)), (0.6 * PUSHER_RADIUS, (255, 255, 255)))

_WALL = (110, 100, 92)
# Zones lie left and right in the upper part. One disc lies below the other, so that it has to pass it, and the other
# can only be reached from above or through the gap.
_ZONE_LOW, _ZONE_HIGH = (0.35, 0.45), (0.7, 0.7)
_LOWER, _UPPER = (-0.45, -0.2), (0.0, 0.2)
_LARGEST_X = 0.4
_PUSHER_LIMIT = 0.85
_OBJECT_DISTANCE = 0.4
_PUSHER_DISTANCE = CONTACT + 0.05
# Separates the random stream of the initial states from other uses of the same seeds.
_INIT_STATE_STREAM = 7302
_SMALLEST_IMAGE = 32
_TOUCH = 0.01  # a gap up to this is contact
_BEHIND_GAP, _BEHIND_COSINE = 0.2, 0.85  # largest gap, smallest cosine between the ways to the disc and to its zone
STATE_NAMES = ("pusher", "object", "distractor", "zone")  # proprio, and the object state that may follow it
_PROPOSITIONS = ("behind", "touching", "near_zone", "in_zone")

Point = tuple[float, float]


@dataclass(frozen=True)
class Scene:
    """An initial state, in table units.

    Attributes:
        pusher: center of the pusher.
        objects: centers of the discs, in the order of `OBJECTS`.
        zones: centers of the zones, in the order of `ZONES`.
    """

    pusher: Point
    objects: tuple[Point, ...]
    zones: tuple[Point, ...]

    @property
    def positions(self) -> Positions:
        """Pusher and objects for `rlvla.envs.toy_push.physics.push`."""
        first, second = self.objects
        return (*self.pusher, *first, *second)


def initial_scene(init_state_id: int) -> Scene:
    """Sample the initial state with this id, the same for all tasks."""
    rng = np.random.default_rng([_INIT_STATE_STREAM, init_state_id])
    sides = (-1.0, 1.0) if rng.random() < 0.5 else (1.0, -1.0)
    zones = tuple((side * x, y) for side, (x, y) in zip(sides, rng.uniform(_ZONE_LOW, _ZONE_HIGH, (2, 2)).tolist()))
    heights = (_LOWER, _UPPER) if rng.random() < 0.5 else (_UPPER, _LOWER)
    while True:
        objects = tuple((float(rng.uniform(-_LARGEST_X, _LARGEST_X)), float(rng.uniform(*y))) for y in heights)
        if distance(*objects) >= _OBJECT_DISTANCE:
            break
    while True:
        pusher = (float(rng.uniform(-_PUSHER_LIMIT, _PUSHER_LIMIT)), float(rng.uniform(-_PUSHER_LIMIT, _PUSHER_LIMIT)))
        if min(distance(pusher, center) for center in objects) >= _PUSHER_DISTANCE:
            return Scene(pusher, objects, zones)


def distance(a: Point, b: Point) -> float:
    """Euclidean distance of two points."""
    return sqrt((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2)


def named(task: TaskSpec) -> tuple[int, int]:
    """Index of the object and of the zone named by a task."""
    return divmod(task.task_id, len(ZONES))


def judge(positions: Positions, named_object: int, zone: Point) -> tuple[bool, frozenset[str]]:
    """Whether the center of the named object lies in its zone, and the events for reward machines.

    Args:
        positions: positions of the pusher and the objects, as numbers.
        named_object: index of the object.
        zone: center of the zone.
    """
    px, py = positions[:2]
    x, y = positions[2 + 2 * named_object : 4 + 2 * named_object]
    way, ahead = (x - px, y - py), (zone[0] - x, zone[1] - y)
    gap, left = sqrt(way[0] * way[0] + way[1] * way[1]), sqrt(ahead[0] * ahead[0] + ahead[1] * ahead[1])
    aligned = way[0] * ahead[0] + way[1] * ahead[1] >= _BEHIND_COSINE * gap * left
    off_center = max(abs(ahead[0]), abs(ahead[1]))
    holds = (
        aligned and gap <= CONTACT + _BEHIND_GAP,
        gap <= CONTACT + _TOUCH,
        off_center <= 2 * ZONE_SIZE,
        off_center <= ZONE_SIZE,
    )
    return holds[-1], frozenset(name for name, true in zip(_PROPOSITIONS, holds) if true)


def paint_background(image: np.ndarray, zones: tuple[Point, ...]) -> None:
    """Draw walls, table and zones over a whole image [H, H, 3] uint8, in place; edges are anti-aliased."""
    image[:] = _WALL
    _paint_square(image, (0.0, 0.0), 1.0, TABLE)
    for center, color in zip(zones, ZONES.values()):
        _paint_square(image, center, ZONE_SIZE, color)


def _paint_square(image: np.ndarray, center: Point, half: float, color: tuple[int, int, int]) -> None:
    size = image.shape[0]
    scale, pixels = size / (2 * VIEW), np.arange(size)
    rows = np.clip(half * scale + 0.5 - np.abs(pixels - ((VIEW - center[1]) * scale - 0.5)), 0.0, 1.0)
    columns = np.clip(half * scale + 0.5 - np.abs(pixels - ((center[0] + VIEW) * scale - 0.5)), 0.0, 1.0)
    coverage = (rows[:, None] * columns[None, :])[:, :, None]
    image[...] = image + coverage * (np.array(color) - image) + 0.5


class ToyPushEnv:
    """The environment; see the module's docstring and `rlvla.envs.base.Env` for the contract.

    Events, all about the named disc: `behind` (the pusher is close to it, on the side away from its zone), `touching`,
    `near_zone` (within twice the size of the zone) and `in_zone`.
    """

    def __init__(self, task: TaskSpec, options: ToyPushOptions):
        self.task, self._options = task, options
        self._runner = ChunkRunner(task.max_steps, options.success_hold_steps, plays_on=options.plays_on)
        self._object, self._zone = named(task)
        self._scene: Scene | None = None
        self._positions: Positions = (0.0,) * 6
        self._background = np.empty((options.image_size, options.image_size, 3), dtype=np.uint8)
        self._closed = False

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. The dynamics are deterministic, so `seed` has no effect."""
        if self._closed:
            raise RuntimeError("this toy_push environment is closed; make another")
        check_init_state_id(self.task, init_state_id)
        self._scene = initial_scene(init_state_id)
        self._positions = self._scene.positions
        paint_background(self._background, self._scene.zones)
        self._runner.begin()
        return self._observe()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute velocities [A, 2] until the end of the chunk or of the episode."""
        self._runner.require_episode()
        assert self._scene is not None
        zone = self._scene.zones[self._zone]

        def advance(action: np.ndarray) -> tuple[bool, frozenset[str]]:
            dx, dy = action.tolist()
            self._positions = push(self._positions, STEP_SIZE * dx, STEP_SIZE * dy, NUMBERS)
            return judge(self._positions, self._object, zone)

        actions = check_actions(actions, self.task.action_dim)
        return self._runner.play(actions, advance, self._observe, self._draw if record_frames else None)

    def privileged_state(self) -> dict[str, np.ndarray]:
        """`pusher`, named `object` and `zone`, and `distractor`: centers [2] in table units."""
        if self._scene is None:
            raise RuntimeError("no episode was started: call reset first")
        return state_of(self._positions, self._object, self._scene.zones[self._zone])

    def close(self) -> None:
        """Close the environment."""
        self._closed = True
        self._runner.end()

    def _draw(self) -> np.ndarray:
        image, centers = self._background.copy(), np.reshape(self._positions, (3, 2))
        for center, color in zip(centers[1:], OBJECTS.values()):
            paint_disc(image, center, OBJECT_RADIUS, color)
        for radius, color in MARKER:
            paint_disc(image, centers[0], radius, color)
        return image

    def _observe(self) -> Observation:
        proprio: np.ndarray | None = None
        if self._options.use_proprio:
            state = self.privileged_state()
            shown = STATE_NAMES if self._options.object_state else STATE_NAMES[:1]
            proprio = np.concatenate([state[name] for name in shown]).astype(np.float32)
        return Observation(self._draw()[None], proprio, self.task.instruction)


def state_of(positions: Positions, named_object: int, zone: Point) -> dict[str, np.ndarray]:
    """See `ToyPushEnv.privileged_state`."""
    pusher, *objects = np.reshape(positions, (3, 2))
    return {
        "pusher": pusher,
        "object": objects[named_object],
        "distractor": objects[1 - named_object],
        "zone": np.array(zone),
    }


@dataclass(frozen=True)
class ToyPushOptions(SuiteOptions):
    """Options of the suite. `render_quality` has no effect.

    With `object_state`, proprio [2] is followed by the centers of the named disc, the other disc and the named zone.
    """

    privileged_options: ClassVar[tuple[str, ...]] = ("object_state",)
    known_cameras: ClassVar[tuple[str, ...]] = CAMERAS
    needs_camera: ClassVar[bool] = True
    smallest_image: ClassVar[int] = _SMALLEST_IMAGE
    can_play_on: ClassVar[bool] = True

    cameras: tuple[str, ...] = CAMERAS
    max_steps: int = 60
    success_hold_steps: int = HOLD_STEPS
    object_state: bool = arg(False, "append position and orientation of the task's objects to proprio")


def list_tasks(**kw) -> list[TaskSpec]:
    """A task for each disc and zone; `kw` are the fields of `ToyPushOptions`. ConfigError lists all invalid values."""
    options = ToyPushOptions(**kw)
    return [
        TaskSpec(
            suite="toy_push",
            task_id=task_id,
            name=f"{color}_to_{zone}",
            instruction=f"push the {color} disc into the {zone} zone",
            max_steps=options.max_steps,
            num_init_states=10_000,
            action_dim=2,
            proprio_dim=8 if options.object_state else 2,
            control_freq=10.0,
            propositions=_PROPOSITIONS,
            machine="chain",
            reward_range=SUCCESS_REWARD,
        )
        for task_id, (color, zone) in enumerate((color, zone) for color in OBJECTS for zone in ZONES)
    ]


def make(task_id: int, **kw) -> ToyPushEnv:
    """Create the environment; `kw` as in `list_tasks`."""
    return ToyPushEnv(task_of("toy_push", list_tasks(**kw), task_id), ToyPushOptions(**kw))

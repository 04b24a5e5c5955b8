"""`toy_reach`: discs on a table, drawn with numpy. Needs no simulator; for first steps, debugging and CI.

Three discs of different colors lie on the table [-1, 1] x [-1, 1] (x right, y up), seen from above. The instruction
names one of them, and a point effector has to come to rest on it. Actions are velocities: a step moves the effector by
at most `STEP_SIZE` in each direction. Any disc can be reached in at most 7 of the 12 steps, but a blind sweep of a
color's lane is too fast to rest on the disc.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions, check_init_state_id, task_of
from rlvla.envs.chunks import SUCCESS_REWARD, ChunkRunner
from rlvla.envs.options import SuiteOptions
from rlvla.utils.cli.flags import arg

# Each color has a third of the table (center x of its lane): with discs anywhere, a small model would need too long to
# ground color words for a first example. The y coordinate of a disc must be read from the image.
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "green": (44, 160, 60),
    "blue": (40, 80, 220),
}
LANES = {"red": -0.6, "green": 0.0, "blue": 0.6}
CAMERAS = ("top",)
TEMPLATE = "reach the {color} disc"
DISC_RADIUS = 0.2
STEP_SIZE = 0.25
HOLD_STEPS = 3

TABLE = (222, 216, 206)
_MARKER_RADIUS = 0.09
# The discs that make up the effector's marker: radius and color.
MARKER = ((_MARKER_RADIUS, (20, 20, 20)), (0.6 * _MARKER_RADIUS, (255, 255, 255)))
# Half the width of the image in table units: the marker stays visible at the edge of the table.
VIEW = 1.0 + _MARKER_RADIUS
_LANE_JITTER = 0.08
_DISC_LOWEST, _DISC_HIGHEST = -0.3, 0.75
_START_LOW, _START_HIGH = np.array([-0.2, -0.9]), np.array([0.2, -0.7])
# Separates the random stream of the initial states from other uses of the same seeds.
_INIT_STATE_STREAM = 7301
_SMALLEST_IMAGE = 16
_NOTHING, _NEAR, _REACHED = frozenset[str](), frozenset({"near"}), frozenset({"near", "reached"})


def paint_disc(image: np.ndarray, center: np.ndarray, radius: float, color: tuple[int, int, int]) -> None:
    """Draw a filled disc in an image, in place.

    Pixels on the rim are anti-aliased, so that subpixel motion is visible.

    Args:
        image: [H, H, 3] uint8.
        center: [2] center in table coordinates (x right, y up).
        radius: radius in table units.
        color: RGB in 0..255.
    """
    size = image.shape[0]
    scale = size / (2 * VIEW)  # pixels per table unit
    column, row = (center[0] + VIEW) * scale - 0.5, (VIEW - center[1]) * scale - 0.5
    reach = radius * scale + 0.5
    top, bottom = max(0, int(row - reach)), min(size, int(row + reach) + 2)
    left, right = max(0, int(column - reach)), min(size, int(column + reach) + 2)
    d_row = np.arange(top, bottom, dtype=np.float32) - np.float32(row)
    d_column = np.arange(left, right, dtype=np.float32) - np.float32(column)
    distance = np.sqrt(d_row[:, None] ** 2 + d_column[None, :] ** 2)
    coverage = np.clip(np.float32(reach) - distance, 0.0, 1.0)[:, :, None]
    patch = image[top:bottom, left:right]
    patch[...] = patch + coverage * (np.array(color, dtype=np.float32) - patch) + np.float32(0.5)


@dataclass
class Scene:
    """Positions of discs and effector, in table units.

    Attributes:
        colors: color names of the discs.
        centers: [3, 2] float64 centers of the discs.
        target: index of the disc that the instruction names.
        effector: [2] float64 position of the effector.
    """

    colors: list[str]
    centers: np.ndarray
    target: int
    effector: np.ndarray


def initial_scene(init_state_id: int) -> Scene:
    """Sample the initial state with this id."""
    rng = np.random.default_rng([_INIT_STATE_STREAM, init_state_id])
    effector = rng.uniform(_START_LOW, _START_HIGH)
    target = int(rng.integers(len(COLORS)))
    x = np.array([LANES[name] for name in COLORS]) + rng.uniform(-_LANE_JITTER, _LANE_JITTER, len(COLORS))
    y = rng.uniform(_DISC_LOWEST, _DISC_HIGHEST, len(COLORS))
    return Scene(list(COLORS), np.stack([x, y], axis=1), target, effector)


class ToyReachEnv:
    """The environment; see the module's docstring and `rlvla.envs.base.Env` for the contract.

    Events: `near` (within twice the named disc's radius of its center) and `reached` (within its radius).

    Args:
        task: the task, including the step limit.
        image_size: height and width of the image in pixels.
        use_proprio: whether observations include the effector's position [2].
        object_state: proprio is followed by the center of the named disc [2].
        success_hold_steps: consecutive steps on the disc that end an episode.
        plays_on: play to the step limit, see `ChunkRunner`.
    """

    def __init__(
        self,
        task: TaskSpec,
        *,
        image_size: int = 64,
        use_proprio: bool = False,
        object_state: bool = False,
        success_hold_steps: int = HOLD_STEPS,
        plays_on: bool = False,
    ):
        self.task = task
        self.image_size = image_size
        self.use_proprio, self._shows_objects = use_proprio, object_state
        self._runner = ChunkRunner(task.max_steps, success_hold_steps, plays_on=plays_on)
        self._scene: Scene | None = None
        self._background = np.empty((image_size, image_size, 3), dtype=np.uint8)
        self._closed = False

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. The dynamics are deterministic, so `seed` has no effect."""
        if self._closed:
            raise RuntimeError("this toy_reach environment is closed; make another")
        check_init_state_id(self.task, init_state_id)
        self._scene = scene = initial_scene(init_state_id)
        self._background[:] = TABLE
        for color, center in zip(scene.colors, scene.centers):
            paint_disc(self._background, center, DISC_RADIUS, COLORS[color])
        self._runner.begin()
        return self._observe(scene)

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute velocities [A, 2] until the end of the chunk or of the episode."""
        self._runner.require_episode()
        scene = self._scene
        assert scene is not None
        actions = check_actions(actions, self.task.action_dim)

        def advance(action: np.ndarray) -> tuple[bool, frozenset[str]]:
            scene.effector = np.clip(scene.effector + STEP_SIZE * action.astype(np.float64), -1.0, 1.0)
            (success,), (events,) = judge(scene.effector[None], scene.centers[scene.target][None])
            return bool(success), events

        frame = (lambda: self._draw(scene)) if record_frames else None
        return self._runner.play(actions, advance, lambda: self._observe(scene), frame)

    def privileged_state(self) -> dict[str, np.ndarray]:
        """`effector` [2], `target` [2] (center of the named disc), `discs` [3, 2], all in table units."""
        if self._scene is None:
            raise RuntimeError("no episode was started: call reset first")
        scene = self._scene
        return {
            "effector": scene.effector.copy(),
            "target": scene.centers[scene.target].copy(),
            "discs": scene.centers.copy(),
        }

    def close(self) -> None:
        """Close the environment."""
        self._closed = True
        self._runner.end()

    def _draw(self, scene: Scene) -> np.ndarray:
        image = self._background.copy()
        for radius, color in MARKER:
            paint_disc(image, scene.effector, radius, color)
        return image

    def _observe(self, scene: Scene) -> Observation:
        state = [scene.effector, *([scene.centers[scene.target]] if self._shows_objects else [])]
        proprio = np.concatenate(state).astype(np.float32) if self.use_proprio else None
        instruction = self.task.instruction.format(color=scene.colors[scene.target])
        return Observation(self._draw(scene)[None], proprio, instruction)


def judge(effectors: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, list[frozenset[str]]]:
    """Success [n] bool and events for effectors [n, 2] and the centers [n, 2] of their named discs."""
    x, y = (effectors - targets).T
    distances = np.sqrt(x * x + y * y)
    events = [_REACHED if d <= DISC_RADIUS else _NEAR if d <= 2 * DISC_RADIUS else _NOTHING for d in distances]
    return distances <= DISC_RADIUS, events


@dataclass(frozen=True)
class ToyReachOptions(SuiteOptions):
    """Options of the suite. `render_quality` has no effect."""

    privileged_options: ClassVar[tuple[str, ...]] = ("object_state",)
    known_cameras: ClassVar[tuple[str, ...]] = CAMERAS
    needs_camera: ClassVar[bool] = True
    smallest_image: ClassVar[int] = _SMALLEST_IMAGE
    can_play_on: ClassVar[bool] = True

    cameras: tuple[str, ...] = CAMERAS
    max_steps: int = 12
    success_hold_steps: int = HOLD_STEPS
    object_state: bool = arg(False, "append position and orientation of the task's objects to proprio")


def list_tasks(**kw) -> list[TaskSpec]:
    """The only task; `kw` are the fields of `ToyReachOptions`. ConfigError lists all invalid values."""
    options = ToyReachOptions(**kw)
    return [
        TaskSpec(
            suite="toy_reach",
            task_id=0,
            name="reach",
            instruction=TEMPLATE,
            max_steps=options.max_steps,
            num_init_states=10_000,
            action_dim=2,
            proprio_dim=4 if options.object_state else 2,
            control_freq=10.0,
            propositions=("near", "reached"),
            machine="chain",
            reward_range=SUCCESS_REWARD,
            instructions=tuple(TEMPLATE.format(color=color) for color in COLORS),
        )
    ]


def make(task_id: int, **kw) -> ToyReachEnv:
    """Create the environment; `kw` as in `list_tasks`."""
    task, options = task_of("toy_reach", list_tasks(**kw), task_id), ToyReachOptions(**kw)
    return ToyReachEnv(
        task,
        image_size=options.image_size,
        use_proprio=options.use_proprio,
        object_state=options.object_state,
        success_hold_steps=options.success_hold_steps,
        plays_on=options.plays_on,
    )

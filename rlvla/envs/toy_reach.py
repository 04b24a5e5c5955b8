"""`toy_reach`: discs on a table, drawn with numpy. No simulator, for first contact, debugging and CI.

Three discs of different colours lie on the table [-1, 1] x [-1, 1] (x right, y up), seen from above. The instruction
names one, and a point effector has to come to rest on it. An action is a velocity: one step moves the effector by at
most `STEP_SIZE` in each direction, so any disc is reached in at most 7 of the 12 steps, while a blind sweep of a
colour's lane is too fast to rest on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, SuccessTracker, TaskSpec, check_actions, check_init_state_id
from rlvla.envs.experts.base import Expert, ExpertConfig
from rlvla.envs.registry import Suite, register_suite
from rlvla.utils.errors import ConfigError

# Each colour keeps to its own third of the table (centre x of the lane): linking a colour word to a disc that may lie
# anywhere takes a model of this size far longer than a first example should last. How far up a disc lies must be seen.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "green": (44, 160, 60),
    "blue": (40, 80, 220),
}
LANES = {"red": -0.6, "green": 0.0, "blue": 0.6}
CAMERAS = ("top",)
DISC_RADIUS = 0.2
STEP_SIZE = 0.25
HOLD_STEPS = 3

_TABLE = (222, 216, 206)
_MARKER_RADIUS = 0.09
_MARKER_OUTER, _MARKER_INNER = (20, 20, 20), (255, 255, 255)
# Half the width of the picture in table units: the marker stays in sight at the edge of the table.
_VIEW = 1.0 + _MARKER_RADIUS
_LANE_JITTER = 0.08
_DISC_LOWEST, _DISC_HIGHEST = -0.3, 0.75
_START_LOW, _START_HIGH = np.array([-0.2, -0.9]), np.array([0.2, -0.7])
# Keeps the initial states apart from any other use of the same integers as seeds.
_INIT_STATE_STREAM = 7301
_SMALLEST_IMAGE = 16


def paint_disc(image: np.ndarray, centre: np.ndarray, radius: float, colour: tuple[int, int, int]) -> None:
    """Draw a filled disc into an image, in place.

    A pixel on the rim is blended by how much of it the disc covers, so that a move of a fraction of a pixel shows.

    Args:
        image: [H, H, 3] uint8.
        centre: [2] table coordinates (x right, y up).
        radius: table units.
        colour: red, green, blue in 0..255.
    """
    size = image.shape[0]
    scale = size / (2 * _VIEW)  # pixels per table unit
    column, row = (centre[0] + _VIEW) * scale - 0.5, (_VIEW - centre[1]) * scale - 0.5
    reach = radius * scale + 0.5
    top, bottom = max(0, int(row - reach)), min(size, int(row + reach) + 2)
    left, right = max(0, int(column - reach)), min(size, int(column + reach) + 2)
    d_row = np.arange(top, bottom, dtype=np.float32) - np.float32(row)
    d_column = np.arange(left, right, dtype=np.float32) - np.float32(column)
    distance = np.sqrt(d_row[:, None] ** 2 + d_column[None, :] ** 2)
    coverage = np.clip(np.float32(reach) - distance, 0.0, 1.0)[:, :, None]
    patch = image[top:bottom, left:right]
    patch[...] = patch + coverage * (np.array(colour, dtype=np.float32) - patch) + np.float32(0.5)


@dataclass
class Scene:
    """What lies where, in table units.

    Attributes:
        colours: names of the discs' colours.
        centres: [3, 2] float64, centres of the discs.
        target: index of the disc that the instruction names.
        effector: [2] float64.
    """

    colours: list[str]
    centres: np.ndarray
    target: int
    effector: np.ndarray


def initial_scene(init_state_id: int) -> Scene:
    """The initial state of that number."""
    rng = np.random.default_rng([_INIT_STATE_STREAM, init_state_id])
    effector = rng.uniform(_START_LOW, _START_HIGH)
    target = int(rng.integers(len(COLOURS)))
    x = np.array([LANES[name] for name in COLOURS]) + rng.uniform(-_LANE_JITTER, _LANE_JITTER, len(COLOURS))
    y = rng.uniform(_DISC_LOWEST, _DISC_HIGHEST, len(COLOURS))
    return Scene(list(COLOURS), np.stack([x, y], axis=1), target, effector)


class ToyReachEnv:
    """The environment; see the module's docstring and `rlvla.envs.base.Env` for the contract.

    Events: `near` within twice the named disc's radius of its centre, `reached` within its radius.

    Args:
        task: which task, with its step limit.
        image_size: side of the square image in pixels.
        use_proprio: whether observations carry the effector's position [2].
        success_hold_steps: consecutive steps on the disc that end an episode.
    """

    def __init__(
        self, task: TaskSpec, *, image_size: int = 64, use_proprio: bool = False, success_hold_steps: int = HOLD_STEPS
    ):
        self.task = task
        self.image_size = image_size
        self.use_proprio = use_proprio
        self._tracker = SuccessTracker(success_hold_steps)
        self._scene: Scene | None = None
        self._background = np.empty((image_size, image_size, 3), dtype=np.uint8)
        self._steps = 0
        self._playing = False
        self._closed = False

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Nothing is random after the initial state, so `seed` changes nothing here."""
        if self._closed:
            raise RuntimeError("this toy_reach environment is closed; make another")
        check_init_state_id(self.task, init_state_id)
        self._scene = scene = initial_scene(init_state_id)
        self._background[:] = _TABLE
        for colour, centre in zip(scene.colours, scene.centres):
            paint_disc(self._background, centre, DISC_RADIUS, COLOURS[colour])
        self._tracker.reset()
        self._steps = 0
        self._playing = True
        return self._observe(scene)

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute velocities [A, 2] until the end of the chunk or of the episode."""
        scene = self._scene
        if scene is None or not self._playing:
            raise RuntimeError("no episode is running: call reset first")
        actions = check_actions(actions, self.task.action_dim)
        rewards = np.zeros(len(actions), dtype=np.float32)
        successes = np.zeros(len(actions), dtype=bool)
        events: list[frozenset[str]] = []
        frames: list[np.ndarray] = []
        terminated = truncated = False
        for index, action in enumerate(actions):
            scene.effector = np.clip(scene.effector + STEP_SIZE * action.astype(np.float64), -1.0, 1.0)
            self._steps += 1
            successes[index], happened = _judge(scene)
            events.append(happened)
            terminated = self._tracker.update(bool(successes[index]))
            truncated = not terminated and self._steps >= self.task.max_steps
            rewards[index] = float(terminated)
            if record_frames:
                frames.append(self._draw(scene))
            if terminated or truncated:
                self._playing = False
                break
        return ChunkResult(
            observation=self._observe(scene),
            steps_executed=len(events),
            rewards=rewards,
            successes=successes,
            terminated=terminated,
            truncated=truncated,
            success_at_end=terminated,
            events=events,
            frames=np.stack(frames) if record_frames else None,
        )

    def privileged_state(self) -> dict[str, np.ndarray]:
        """`effector` [2], `target` [2] (centre of the named disc), `discs` [3, 2], all in table units."""
        if self._scene is None:
            raise RuntimeError("no episode was started: call reset first")
        scene = self._scene
        return {
            "effector": scene.effector.copy(),
            "target": scene.centres[scene.target].copy(),
            "discs": scene.centres.copy(),
        }

    def close(self) -> None:
        """End the environment's use."""
        self._closed = True
        self._playing = False

    def _draw(self, scene: Scene) -> np.ndarray:
        image = self._background.copy()
        paint_disc(image, scene.effector, _MARKER_RADIUS, _MARKER_OUTER)
        paint_disc(image, scene.effector, 0.6 * _MARKER_RADIUS, _MARKER_INNER)
        return image

    def _observe(self, scene: Scene) -> Observation:
        proprio = scene.effector.astype(np.float32) if self.use_proprio else None
        instruction = self.task.instruction.format(colour=scene.colours[scene.target])
        return Observation(self._draw(scene)[None], proprio, instruction)


def _judge(scene: Scene) -> tuple[bool, frozenset[str]]:
    """Whether the effector is on the named disc, and what there is to tell a reward machine."""
    distance = float(np.linalg.norm(scene.effector - scene.centres[scene.target]))
    if distance <= DISC_RADIUS:
        return True, frozenset({"near", "reached"})
    return False, frozenset({"near"} if distance <= 2 * DISC_RADIUS else ())


def _list_tasks(
    *,
    cameras: Sequence[str] = CAMERAS,
    image_size: int = 64,
    use_proprio: bool = False,
    max_steps: int = 12,
    success_hold_steps: int = HOLD_STEPS,
    render_quality: str = "fast",
) -> list[TaskSpec]:
    problems = []
    if tuple(cameras) != CAMERAS:
        problems.append(f"toy_reach cannot show cameras {list(cameras)}; known cameras: {', '.join(CAMERAS)}, once")
    if image_size < _SMALLEST_IMAGE:
        problems.append(f"image_size must be at least {_SMALLEST_IMAGE} for toy_reach, not {image_size}")
    if max_steps < 1:
        problems.append(f"max_steps must be at least 1, not {max_steps}")
    if success_hold_steps < 1:
        problems.append(f"success_hold_steps must be at least 1, not {success_hold_steps}")
    # Both qualities look the same here: there is nothing to leave out.
    if render_quality not in ("fast", "full"):
        problems.append(f"render_quality must be 'fast' or 'full', not '{render_quality}'")
    if problems:
        raise ConfigError(problems)
    return [
        TaskSpec(
            suite="toy_reach",
            task_id=0,
            name="reach",
            instruction="reach the {colour} disc",
            max_steps=max_steps,
            num_init_states=10_000,
            action_dim=2,
            proprio_dim=2,
            control_freq=10.0,
            propositions=("near", "reached"),
        )
    ]


def _make(
    task_id: int,
    *,
    cameras: Sequence[str] = CAMERAS,
    image_size: int = 64,
    use_proprio: bool = False,
    max_steps: int = 12,
    success_hold_steps: int = HOLD_STEPS,
    render_quality: str = "fast",
) -> ToyReachEnv:
    tasks = _list_tasks(
        cameras=cameras,
        image_size=image_size,
        use_proprio=use_proprio,
        max_steps=max_steps,
        success_hold_steps=success_hold_steps,
        render_quality=render_quality,
    )
    if task_id not in range(len(tasks)):
        raise ConfigError(f"toy_reach has no task {task_id}; known tasks: 0 (reach)")
    return ToyReachEnv(
        tasks[task_id], image_size=image_size, use_proprio=use_proprio, success_hold_steps=success_hold_steps
    )


def _expert(task: TaskSpec, config: ExpertConfig) -> Expert:
    from rlvla.envs.experts.toy_reach import ToyReachExpert

    return ToyReachExpert(config)


register_suite("toy_reach", Suite(list_tasks=_list_tasks, make=_make, cameras=CAMERAS, expert=_expert))

"""robosuite behind the environment contract: suite `robosuite`, a Panda arm under OSC_POSE."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions, check_init_state_id
from rlvla.envs.chunks import ChunkRunner
from rlvla.envs.experts.base import Expert, ExpertConfig
from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.robosuite_import import import_robosuite
from rlvla.envs.robosuite_tasks import TASKS
from rlvla.utils.errors import ConfigError

SUITE = "robosuite"
# Our name of a camera -> MuJoCo's.
CAMERAS = {
    "agentview": "agentview",
    "wrist": "robot0_eye_in_hand",
    "closeup": "closeup",  # ours; placed by the task
    "frontview": "frontview",
    "sideview": "sideview",
    "birdview": "birdview",
    "robotview": "robot0_robotview",
}
RENDER_QUALITIES = ("fast", "full")
ACTION_DIM, PROPRIO_DIM = 7, 6  # one less each where there is no gripper
NUM_INIT_STATES = 10_000
HOLD_SECONDS = 0.25  # success must last this long before it ends an episode
_PHYSICS_FREQ = 500.0  # robosuite's physics steps per second


@dataclass(frozen=True)
class RobosuiteOptions:
    """Options of the suite, validated as a whole.

    Attributes:
        cameras: names from `CAMERAS`; may be empty, then nothing is rendered and no GL is needed.
        image_size: height and width of the images in pixels.
        use_proprio: whether observations hold the proprioceptive vector.
        max_steps: control steps until truncation; by default the task's time times `control_freq`.
        success_hold_steps: consecutive successful steps that end an episode; by default a quarter of a second.
        control_freq: control steps per simulated second, at most 500.
        render_quality: "fast" leaves out shadows, reflections and multisampling and simplifies the robot's visual
            meshes; "full" renders as robosuite does. Physics is the same.
    """

    cameras: tuple[str, ...] = ("agentview",)
    image_size: int = 64
    use_proprio: bool = False
    max_steps: int | None = None
    success_hold_steps: int | None = None
    control_freq: float = 20
    render_quality: str = "fast"

    def __post_init__(self):
        problems = []
        unknown = [name for name in self.cameras if name not in CAMERAS]
        if unknown:
            problems.append(f"unknown camera(s) {', '.join(unknown)} of suite {SUITE}; known: {', '.join(CAMERAS)}")
        if len(set(self.cameras)) < len(self.cameras):
            problems.append(f"cameras are named twice: {', '.join(self.cameras)}")
        if self.image_size < 1:
            problems.append(f"image_size must be at least 1 pixel, not {self.image_size}")
        if self.max_steps is not None and self.max_steps < 1:
            problems.append(f"max_steps must be at least 1, not {self.max_steps}")
        if self.success_hold_steps is not None and self.success_hold_steps < 1:
            problems.append(f"success_hold_steps must be at least 1, not {self.success_hold_steps}")
        if not 1 <= self.control_freq <= _PHYSICS_FREQ:
            problems.append(f"control_freq must lie in [1, {_PHYSICS_FREQ:g}] Hz, not {self.control_freq}")
        if self.render_quality not in RENDER_QUALITIES:
            problems.append(f"render_quality must be one of {', '.join(RENDER_QUALITIES)}, not {self.render_quality!r}")
        if problems:
            raise ConfigError(problems)


def _options(kw: dict) -> RobosuiteOptions:
    known = RobosuiteOptions.__dataclass_fields__
    unknown = sorted(set(kw) - set(known))
    if unknown:
        raise ConfigError(f"suite {SUITE} has no option {', '.join(unknown)}; it has: {', '.join(known)}")
    if "cameras" in kw:
        cameras: Sequence[str] = kw["cameras"]
        kw = {**kw, "cameras": (cameras,) if isinstance(cameras, str) else tuple(cameras)}
    return RobosuiteOptions(**kw)


def list_tasks(**kw) -> list[TaskSpec]:
    """The tasks of the suite; `kw` are the fields of `RobosuiteOptions`."""
    options = _options(kw)
    return [
        TaskSpec(
            suite=SUITE,
            task_id=task_id,
            name=task.name,
            instruction=task.instruction,
            max_steps=options.max_steps or math.ceil(task.seconds * options.control_freq),
            num_init_states=NUM_INIT_STATES,
            action_dim=ACTION_DIM if task.has_gripper else ACTION_DIM - 1,
            proprio_dim=PROPRIO_DIM if task.has_gripper else PROPRIO_DIM - 1,
            control_freq=float(options.control_freq),
            propositions=task.facts.propositions,
        )
        for task_id, task in enumerate(TASKS)
    ]


class RobosuiteEnv:
    """One robosuite task.

    Actions [7] in [-1, 1]: end-effector displacement (1 = 5 cm, world axes), rotation (1 = 0.5 rad about world axes),
    gripper (sign: negative opens, positive closes, 0 holds). Wipe has no gripper: [6].

    Proprio [6]: end-effector x, y (from the middle of the table or of the first bin), z (above it) in metres; sine and
    cosine of its yaw; distance between the fingers in metres (left out in Wipe: [5]).

    Privileged state: `eef_pos` [3], `eef_quat` [4] (w first), `gripper_qpos` [2], and what the task adds, see
    `rlvla.envs.robosuite_facts`.

    Nothing is random after the reset: trajectories do not depend on `seed`.

    Args:
        spec: the task, with the step limit to use.
        options: validated options.
    """

    def __init__(self, spec: TaskSpec, options: RobosuiteOptions):
        import_robosuite()  # first: without it nothing below can be imported
        from rlvla.envs.mesh_cache import lighten_visual_meshes
        from rlvla.envs.mujoco_rendering import Renderer, add_camera
        from rlvla.envs.robosuite_sim import RobosuiteSim, build_robosuite

        task = TASKS[spec.task_id]

        def edit_xml(xml: str) -> str:
            closeup = task.closeup
            xml = add_camera(xml, CAMERAS["closeup"], closeup.position, closeup.target, closeup.fovy)
            return lighten_visual_meshes(xml) if options.render_quality == "fast" and options.cameras else xml

        self.task, self.options = spec, options
        self._sim = RobosuiteSim(build_robosuite(spec.name, options.control_freq, edit_xml))
        self._facts = task.facts(self._sim)
        self._cameras = [self._sim.model.camera(CAMERAS[name]).id for name in options.cameras]
        self._renderer = (
            Renderer(self._sim.model, options.image_size, options.render_quality) if self._cameras else None
        )
        hold_steps = options.success_hold_steps or math.ceil(HOLD_SECONDS * options.control_freq)
        self._runner = ChunkRunner(spec.max_steps, hold_steps)
        self._task_hash = zlib.crc32(f"{SUITE}/{spec.name}".encode())

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, num_init_states)."""
        self._require_open()
        check_init_state_id(self.task, init_state_id)
        self._sim.reset(np.random.default_rng((self._task_hash, init_state_id)))
        self._runner.begin()
        return self._observe()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D] until done; see `Env.step_chunk`."""
        self._require_open()
        actions = check_actions(actions, self.task.action_dim)
        self._runner.require_episode()
        if record_frames and not self._cameras:
            raise ValueError("frames cannot be recorded: the environment was made without cameras")
        camera = self._cameras[:1]
        return self._runner.play(
            actions, self._advance, self._observe, (lambda: self._images(camera)[0]) if record_frames else None
        )

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        self._sim.step(action)
        return self._sim.success(), self._facts.events()

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state for scripted experts; the keys stand in the docstring of the class."""
        self._require_open()
        import mujoco

        data, site, quat = self._sim.data, self._sim.eef_site, np.empty(4)
        mujoco.mju_mat2Quat(quat, data.site_xmat[site])
        return {
            "eef_pos": data.site_xpos[site].copy(),
            "eef_quat": quat,
            "gripper_qpos": data.qpos[self._sim.gripper_qpos_index],
            **self._facts.state(),
        }

    def close(self) -> None:
        """Release the simulator. Safe to call twice."""
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = self._sim = self._facts = None  # type: ignore[assignment]

    def _require_open(self) -> None:
        if self._sim is None:
            raise RuntimeError("the environment has been closed")

    def _images(self, cameras: list[int]) -> np.ndarray:
        if self._renderer is None:  # made without cameras
            return np.empty((0, self.options.image_size, self.options.image_size, 3), dtype=np.uint8)
        return self._renderer.render(self._sim.data, cameras)

    def _observe(self) -> Observation:
        images = self._images(self._cameras)
        return Observation(images, self._proprio() if self.options.use_proprio else None, self.task.instruction)

    def _proprio(self) -> np.ndarray:
        data, site = self._sim.data, self._sim.eef_site
        position, mat = data.site_xpos[site] - self._facts.origin, data.site_xmat[site]
        yaw = math.atan2(mat[3], mat[0])
        fingers = data.qpos[self._sim.gripper_qpos_index]
        opening = [fingers[0] - fingers[1]] if len(fingers) else []
        return np.array([*position, math.sin(yaw), math.cos(yaw), *opening], dtype=np.float32)


def make(task_id: int, **kw) -> RobosuiteEnv:
    """Build the environment of one task; `kw` are the fields of `RobosuiteOptions`.

    Raises:
        ConfigError: unknown task, camera or option, a bad value, or no working GL.
        MissingExtraError: robosuite is not installed.
    """
    specs = list_tasks(**kw)
    if not 0 <= task_id < len(specs):
        known = ", ".join(f"{spec.task_id} ({spec.name})" for spec in specs)
        raise ConfigError(f"suite {SUITE} has no task {task_id}; its tasks: {known}")
    options, task = _options(kw), TASKS[task_id]
    missing = [name for name in options.cameras if name in task.missing_cameras]
    if missing:
        raise ConfigError(f"robosuite's {task.name} has no camera {', '.join(missing)}; choose another")
    return RobosuiteEnv(specs[task_id], options)


def _expert(task: TaskSpec, config: ExpertConfig) -> Expert:
    from rlvla.envs.experts.robosuite import make_robosuite_expert

    return make_robosuite_expert(task.name, config)


# Lift alone unless others are named: the tasks differ in length and action dimensions.
register_suite(
    SUITE,
    Suite(
        list_tasks=list_tasks,
        make=make,
        cameras=tuple(CAMERAS),
        default_tasks=(0,),
        requires=("robosuite", "mujoco", "numba"),
        expert=_expert,
    ),
)

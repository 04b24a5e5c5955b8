"""LIBERO behind the environment contract: suites `libero_spatial`, `_object`, `_goal`, `_10` and `_90`, 130 tasks.

The scenes, goals and initial states are LIBERO's own; physics runs through MuJoCo's raw interface as in
`rlvla.envs.robosuite_sim`.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rlvla.envs import libero_install as install
from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions, check_init_state_id
from rlvla.envs.chunks import ChunkRunner
from rlvla.envs.registry import Suite, register_suite
from rlvla.utils.errors import ConfigError

# Step limits of the published evaluations; the settle steps come on top.
MAX_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
CAMERAS = {
    "agentview": "agentview",
    "wrist": "robot0_eye_in_hand",
    "frontview": "frontview",
    "birdview": "birdview",
    "sideview": "sideview",
}
NUM_INIT_STATES = 50
IMAGE_SIZE, CONTROL_FREQ = 256, 20.0
ACTION_DIM, PROPRIO_DIM = 7, 8
SETTLE_STEPS = 10
NOOP = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)  # stands still with an open gripper
# LIBERO's environments end at the first step at which the goal holds.
HOLD_STEPS = 1


@dataclass(frozen=True)
class LiberoOptions:
    """Options of the suites, validated as a whole.

    Attributes:
        cameras: names from `CAMERAS`; may be empty, then nothing is rendered.
        image_size: height and width of the images in pixels.
        use_proprio: whether observations hold the proprioceptive vector.
        max_steps: steps until truncation, without the settle steps; by default the suite's published limit.
        render_quality: "fast" leaves out shadows, reflections and multisampling and simplifies the robot's visual
            meshes; "full" renders as LIBERO does. Physics is the same.
        success_hold_steps: consecutive successful steps that end an episode.
        libero_assets: folder of LIBERO's meshes and textures.
        settle_steps: steps without motion after a reset, while objects drop onto their support.
    """

    cameras: tuple[str, ...] = ("agentview",)
    image_size: int = IMAGE_SIZE
    use_proprio: bool = False
    max_steps: int | None = None
    success_hold_steps: int = HOLD_STEPS
    render_quality: str = "fast"
    libero_assets: str | None = None
    settle_steps: int = SETTLE_STEPS

    def __post_init__(self):
        problems = []
        unknown = [name for name in self.cameras if name not in CAMERAS]
        if unknown:
            problems.append(f"unknown camera(s) {', '.join(unknown)} of LIBERO; known: {', '.join(CAMERAS)}")
        if len(set(self.cameras)) < len(self.cameras):
            problems.append(f"cameras are named twice: {', '.join(self.cameras)}")
        if self.image_size < 1:
            problems.append(f"image_size must be at least 1 pixel, not {self.image_size}")
        if self.max_steps is not None and self.max_steps < 1:
            problems.append(f"max_steps must be at least 1, not {self.max_steps}")
        if self.success_hold_steps < 1:
            problems.append(f"success_hold_steps must be at least 1, not {self.success_hold_steps}")
        if self.render_quality not in ("fast", "full"):
            problems.append(f"render_quality must be one of fast, full, not {self.render_quality!r}")
        if self.settle_steps < 0:
            problems.append(f"settle_steps must not be negative, but is {self.settle_steps}")
        if problems:
            raise ConfigError(problems)


def _options(suite: str, kw: dict) -> LiberoOptions:
    known = LiberoOptions.__dataclass_fields__
    unknown = sorted(set(kw) - set(known))
    if unknown:
        raise ConfigError(f"suite {suite} has no option {', '.join(unknown)}; it has: {', '.join(known)}")
    if "cameras" in kw:
        cameras: Sequence[str] = kw["cameras"]
        kw = {**kw, "cameras": (cameras,) if isinstance(cameras, str) else tuple(cameras)}
    return LiberoOptions(**kw)


def instruction_of(name: str) -> str:
    """The sentence that LIBERO derives from a name: `KITCHEN_SCENE3_turn_on_the_stove` -> `turn on the stove`."""
    words = name.split("_")
    scene = next((index for index, word in enumerate(words) if word.startswith("SCENE")), -1)
    return " ".join(words[scene + 1 :])


def proposition_of(predicate: Sequence[str]) -> str:
    """The name of a goal's part among the events: `("on", "bowl_1", "plate_1")` -> `on_bowl_1_plate_1`."""
    return "_".join(predicate)


def list_tasks(suite: str, **kw) -> list[TaskSpec]:
    """The tasks of a suite; `kw` are the fields of `LiberoOptions`. MissingExtraError where LIBERO is not installed."""
    options = _options(suite, kw)
    specs = []
    for task_id, name in enumerate(install.task_names()[suite]):
        goal = install.goal_of(install.bddl_file(suite, name).read_text(encoding="utf-8"))
        specs.append(
            TaskSpec(
                suite=suite,
                task_id=task_id,
                name=name,
                instruction=instruction_of(name),
                max_steps=options.max_steps or MAX_STEPS[suite],
                num_init_states=NUM_INIT_STATES,
                action_dim=ACTION_DIM,
                proprio_dim=PROPRIO_DIM,
                control_freq=CONTROL_FREQ,
                propositions=tuple(dict.fromkeys(map(proposition_of, goal))),
                rows_from_below=True,
            )
        )
    return specs


def axis_angle(quat: np.ndarray) -> np.ndarray:
    """Rotation vector [3] in radians of a quaternion [4] (x, y, z, w); angle in [0, 2 pi], zero where |w| = 1."""
    w = float(np.clip(quat[3], -1.0, 1.0))
    norm = math.sqrt(1.0 - w * w)
    if math.isclose(norm, 0.0):
        return np.zeros(3)
    return quat[:3] * (2.0 * math.acos(w) / norm)


class LiberoEnv:
    """One LIBERO task.

    Actions [7] in [-1, 1]: end-effector displacement (1 = 5 cm, world axes), rotation (1 = 0.5 rad about world axes),
    gripper (sign: negative opens, positive closes).

    Images are as LIBERO gives them, its first row being the lowest: policies that were trained on LIBERO turn them by
    180 degrees themselves (`rlvla.models.vla.image_processing.libero_image`).

    Proprio [8]: end-effector position 3, orientation as axis-angle 3, positions of the two fingers.

    Privileged state: `eef_pos` [3], `gripper_qpos` [2], and position `<object>_pos` [3] and orientation `<object>_quat`
    [4] (w first) of every object and fixture, in metres in the world frame.

    Nothing is random: trajectories do not depend on `seed`.

    Args:
        spec: the task, with the step limit to use.
        options: validated options.
    """

    def __init__(self, spec: TaskSpec, options: LiberoOptions):
        libero = install.import_libero(install.find_assets(options.libero_assets))
        # Only now: without robosuite nothing below can be imported.
        from rlvla.envs.mujoco_rendering import Renderer
        from rlvla.envs.robosuite_sim import BUILD_SEED, RobosuiteSim, numpy_seed, physics_only, with_edited_xml

        self.task, self.options = spec, options
        bddl = install.bddl_file(spec.suite, spec.name)
        kind = libero.bddl_utils.get_problem_info(str(bddl))["problem_name"]
        task_class = with_edited_xml(libero.TASK_MAPPING[kind], partial(_lighter, fast=self._draws_fast))
        # Where fixtures stand is drawn when a scene is built: the same in every process.
        with numpy_seed(BUILD_SEED), contextlib.redirect_stdout(io.StringIO()):
            env = task_class(str(bddl), robots=["Panda"], **physics_only(CONTROL_FREQ))
        env.visualize(vis_settings=dict.fromkeys(env._visualizations, False))  # no marks at the gripper
        self._sim = RobosuiteSim(env)
        self._states = install.init_states(spec.suite, spec.name)
        size = 1 + self._sim.model.nq + self._sim.model.nv
        if self._states.shape != (NUM_INIT_STATES, size):
            raise ConfigError(
                f"{spec.suite} task {spec.task_id} has initial states {list(self._states.shape)}, not "
                f"{[NUM_INIT_STATES, size]}. Install the pinned hf-libero: examples/scripts/install_libero.sh"
            )
        self._goal = [(proposition_of(state), state) for state in env.parsed_problem["goal_state"]]
        self._hand = self._sim.model.body(env.robots[0].robot_model.eef_name).id
        self._cameras = [self._sim.model.camera(CAMERAS[name]).id for name in options.cameras]
        self._renderer = (
            Renderer(self._sim.model, options.image_size, options.render_quality, show_sites=True)
            if self._cameras
            else None
        )
        self._runner = ChunkRunner(spec.max_steps, options.success_hold_steps)

    @property
    def _draws_fast(self) -> bool:
        return bool(self.options.cameras) and self.options.render_quality == "fast"

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, 50)."""
        self._require_open()
        check_init_state_id(self.task, init_state_id)
        self._sim.restore(self._states[init_state_id])
        for _ in range(self.options.settle_steps):
            self._sim.step(NOOP)
        self._sim.env._post_process()
        self._runner.begin()
        return self._observe()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, 7] until done; see `Env.step_chunk`."""
        self._require_open()
        actions = check_actions(actions, ACTION_DIM)
        self._runner.require_episode()
        if record_frames and not self._cameras:
            raise ValueError("frames cannot be recorded: the environment was made without cameras")
        camera = self._cameras[:1]
        frame = (lambda: self._images(camera)[0]) if record_frames else None
        return self._runner.play(actions, self._advance, self._observe, frame)

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state for scripted experts; the keys stand in the docstring of the class."""
        self._require_open()
        data, env = self._sim.data, self._sim.env
        state = {
            "eef_pos": data.site_xpos[self._sim.eef_site].copy(),
            "gripper_qpos": data.qpos[self._sim.gripper_qpos_index],
        }
        for name, body in env.obj_body_id.items():
            state[f"{name}_pos"], state[f"{name}_quat"] = data.xpos[body].copy(), data.xquat[body].copy()
        return state

    def close(self) -> None:
        """Release the simulator. Safe to call twice."""
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = self._sim = None  # type: ignore[assignment]

    def _require_open(self) -> None:
        if self._sim is None:
            raise RuntimeError("the environment has been closed")

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        self._sim.step(action)
        env = self._sim.env
        env._post_process()  # e.g. the flame of a stove that has been turned on
        holds = [(name, bool(env._eval_predicate(state))) for name, state in self._goal]
        return all(value for _, value in holds), frozenset(name for name, value in holds if value)

    def _images(self, cameras: list[int]) -> np.ndarray:
        if self._renderer is None:  # made without cameras
            return np.empty((0, self.options.image_size, self.options.image_size, 3), dtype=np.uint8)
        return np.ascontiguousarray(self._renderer.render(self._sim.data, cameras)[:, ::-1])

    def _observe(self) -> Observation:
        proprio = self._proprio() if self.options.use_proprio else None
        return Observation(self._images(self._cameras), proprio, self.task.instruction)

    def _proprio(self) -> np.ndarray:
        data = self._sim.data
        w, x, y, z = data.xquat[self._hand]
        rotation = axis_angle(np.array([x, y, z, w]))
        position, fingers = data.site_xpos[self._sim.eef_site], data.qpos[self._sim.gripper_qpos_index]
        return np.concatenate([position, rotation, fingers]).astype(np.float32)


def _lighter(xml: str, *, fast: bool) -> str:
    """Reduce the robot's visual meshes; LIBERO's own have textures, which a reduction would lose."""
    if not fast:
        return xml
    import robosuite

    from rlvla.envs.mesh_cache import lighten_visual_meshes

    return lighten_visual_meshes(xml, below=Path(robosuite.__file__).parent)


def make(suite: str, task_id: int, **kw) -> LiberoEnv:
    """Build the environment of one task; `kw` are the fields of `LiberoOptions`.

    Raises:
        ConfigError: unknown task, camera or option, a bad value, no assets, or no working GL.
        MissingExtraError: LIBERO is not installed.
    """
    specs = list_tasks(suite, **kw)
    if not 0 <= task_id < len(specs):
        known = ", ".join(f"{spec.task_id} ({spec.name})" for spec in specs)
        raise ConfigError(f"suite {suite} has no task {task_id}; its tasks: {known}")
    return LiberoEnv(specs[task_id], _options(suite, kw))


for _suite in MAX_STEPS:
    register_suite(
        _suite,
        Suite(
            list_tasks=partial(list_tasks, _suite),
            make=partial(make, _suite),
            cameras=tuple(CAMERAS),
            image_size=IMAGE_SIZE,
            requires=("libero", "robosuite", "mujoco", "numba"),
        ),
    )

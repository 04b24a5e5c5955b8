"""LIBERO as rlvla environments: suites `libero_spatial`, `_object`, `_goal`, `_10` and `_90`, 130 tasks in total.

LIBERO-PRO perturbs each of the first four along four axes (`libero_goal_swap`, ...): 16 suites of 10 tasks.

Scenes, goals and initial states are LIBERO's; physics runs through the raw MuJoCo API, as in
`rlvla.envs.robosuite.sim`.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlvla.envs.base import Observation, TaskSpec, check_init_state_id, task_of
from rlvla.envs.chunks import SUCCESS_REWARD
from rlvla.envs.libero import install as install
from rlvla.envs.mujoco.arm_env import MujocoArmEnv
from rlvla.envs.options import SuiteOptions
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlvla.envs.libero.scene import SceneGeometry

# Step limits of published evaluations, excluding the settle steps.
MAX_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
# LIBERO-PRO: suffix of the suite name -> perturbed aspect.
AXES = {"_object": "object", "_swap": "position", "_lan": "semantic", "_task": "task"}
_LANGUAGE_VARIANTS = ("_lan", "_task")  # instructions from the task definitions instead of the names
PRO_SUITES = tuple(
    base + axis for base in ("libero_spatial", "libero_object", "libero_goal", "libero_10") for axis in AXES
)
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
NOOP = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)  # no motion, open gripper
MOVING = ("near", "grasped", "lifted")  # stages of moving an object
# Meters: from the gripper to the object's center, and height above its position after the reset. Contacts are checked
# only for objects closer than GRASPABLE.
NEAR, LIFTED, GRASPABLE = 0.1, 0.04, 0.3
# LIBERO ends an episode at the first step at which the goal holds.
HOLD_STEPS = 1
# A `TaskSpec` with the properties of all LIBERO tasks.
libero_task = partial(
    TaskSpec,
    num_init_states=NUM_INIT_STATES,
    action_dim=ACTION_DIM,
    proprio_dim=PROPRIO_DIM,
    control_freq=CONTROL_FREQ,
    images_flipped_vertically=True,
    gripper_dims=(ACTION_DIM - 1,),
    machine="goals",
    reward_range=SUCCESS_REWARD,
)


@dataclass(frozen=True)
class LiberoOptions(SuiteOptions):
    """Options of the suites.

    Without cameras, nothing is rendered. `max_steps` excludes the settle steps and defaults to the suite's published
    limit.

    Attributes:
        libero_assets: folder with LIBERO's meshes and textures.
        settle_steps: no-op steps after a reset, during which objects settle on their support.
    """

    known_cameras: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    can_play_on: ClassVar[bool] = True

    cameras: tuple[str, ...] = ("agentview",)
    image_size: int = IMAGE_SIZE
    success_hold_steps: int = HOLD_STEPS
    libero_assets: str | None = arg(
        None,
        "folder of LIBERO's meshes and textures (default: $RLVLA_LIBERO_ASSETS, else LIBERO's own)",
        metavar="DIR",
        recorded=False,
    )
    settle_steps: int = field(default=SETTLE_STEPS, metadata={"minimum": 0})


def env_mb(options: Mapping[str, Any]) -> int:
    """Memory of one environment in MB, measured on the tasks of the four suites; see `Suite.env_mb`."""
    return 80 if options.get("render_quality", LiberoOptions.render_quality) == "fast" else 1_100


def instruction_of(name: str) -> str:
    """LIBERO's instruction for a task name: `KITCHEN_SCENE3_turn_on_the_stove` -> `turn on the stove`."""
    tokens = name.split("_")
    scene = next((index for index, token in enumerate(tokens) if token.startswith("SCENE")), -1)
    return " ".join(tokens[scene + 1 :])


def proposition_of(predicate: Sequence[str]) -> str:
    """Event name of a goal predicate: `("on", "bowl_1", "plate_1")` -> `on_bowl_1_plate_1`."""
    return "_".join(predicate)


def in_order(goal: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Predicates in an order in which they can be brought about: open, place from the bottom up, close."""
    rank = {"turnon": 0, "turnoff": 0, "open": 0, "on": 1, "in": 1, "close": 2}
    support = {p[1]: p[2] for p in goal if len(p) == 3}

    def depth(name: str) -> int:
        return 0 if name not in support else 1 + depth(support[name])

    return tuple(sorted(goal, key=lambda p: (rank.get(p[0], 1), depth(p[1]) if len(p) == 3 else 0)))


@dataclass(frozen=True)
class TaskFacts:
    """Goal of a task, from which its propositions follow.

    Attributes:
        goal: predicates of the goal, each with its arguments, see `in_order`.
        moved: objects to be moved.
        operated: fixtures to be opened, closed or switched.
    """

    goal: tuple[tuple[str, ...], ...]
    moved: tuple[str, ...]
    operated: tuple[str, ...]

    @classmethod
    def of(cls, bddl: str) -> TaskFacts:
        """Read a BDDL definition."""
        goal = in_order(tuple(dict.fromkeys(install.goal_of(bddl))))
        objects, fixtures = set(install.names_in(bddl, "objects")), install.names_in(bddl, "fixtures")
        subjects = list(dict.fromkeys(predicate[1] for predicate in goal))
        moved = tuple(name for name in subjects if name in objects)
        # A region is named after the fixture it belongs to: wooden_cabinet_1_top_region.
        operated = [f for name in subjects if name not in objects for f in fixtures if f"{name}_".startswith(f"{f}_")]
        return cls(goal, moved, tuple(dict.fromkeys(operated)))

    @property
    def propositions(self) -> tuple[str, ...]:
        """The goal's predicates; `near`, `grasped`, `lifted` of moved objects; `touched` of operated fixtures.

        All but the predicates occur once for any object, and once per object with its name.
        """
        stages = [(kind, name) for name in self.moved for kind in MOVING] + [
            ("touched", name) for name in self.operated
        ]
        kinds = dict.fromkeys(kind for kind, _ in stages)
        return (*map(proposition_of, self.goal), *kinds, *(f"{kind}_{name}" for kind, name in stages))

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """See `TaskSpec.goals`."""
        stages = []
        for predicate in self.goal:
            subject = predicate[1]
            touched = [f"touched_{name}" for name in self.operated if f"{subject}_".startswith(f"{name}_")]
            before = [f"{kind}_{subject}" for kind in MOVING] if subject in self.moved else touched
            stages.append((*before, proposition_of(predicate)))
        return tuple(stages)


def list_tasks(suite: str, **kw) -> list[TaskSpec]:
    """The tasks of a suite; `kw` are the fields of `LiberoOptions`. MissingExtraError if LIBERO is not installed."""
    options = LiberoOptions(**kw)
    axis = next((axis for axis in AXES if suite in PRO_SUITES and suite.endswith(axis)), "")  # "" for LIBERO itself
    specs = []
    for task_id, name in enumerate(install.task_names_of(suite)):
        definition = install.bddl_file(suite, name).read_text(encoding="utf-8")
        facts = TaskFacts.of(definition)
        specs.append(
            libero_task(
                suite=suite,
                task_id=task_id,
                name=name,
                instruction=install.language_of(definition) if axis in _LANGUAGE_VARIANTS else instruction_of(name),
                max_steps=options.max_steps or MAX_STEPS[suite.removesuffix(axis)],
                propositions=facts.propositions,
                goals=facts.stages,
                category=AXES.get(axis, ""),
            )
        )
    return specs


def axis_angle(quat: np.ndarray) -> np.ndarray:
    """Rotation vector [3] in radians of a quaternion [4] (x, y, z, w); angle in [0, 2 pi], zero if |w| = 1."""
    w = float(np.clip(quat[3], -1.0, 1.0))
    norm = math.sqrt(1.0 - w * w)
    if math.isclose(norm, 0.0):
        return np.zeros(3)
    return quat[:3] * (2.0 * math.acos(w) / norm)


class LiberoEnv(MujocoArmEnv):
    """One LIBERO task.

    Actions [7] in [-1, 1]: end-effector displacement (1 = 5 cm, world axes), rotation (1 = 0.5 rad about world axes),
    gripper (sign: negative opens, positive closes).

    Images are LIBERO's, flipped vertically (the first row is the lowest); policies trained on LIBERO rotate them by
    180 degrees (`rlvla.models.vla.image_processing.libero_image`).

    Proprio [8]: end-effector position [3], orientation as axis-angle [3], positions of the two fingers [2].

    Privileged state, in meters in the world frame, quaternions w first:

    - `base_pos` [3] of the robot, `eef_pos` [3], `eef_quat` [4], `gripper_qpos` [2];
    - `<object>_pos`, `<object>_quat` of each object and fixture; in its own frame, its center of mass `_com` [3] and
      points `_points` [N, 3] on its collision surface;
    - `<region>_pos`, `_quat` and half extents `_size` [3] of each region;
    - of each region or fixture that is opened or switched: position of its joint `_joint` [], `_range` [2],
      `_axis` [3], `_anchor` [3], `_slides`, LIBERO's `_is_open`, `_is_close`, and its moving part as object
      `<name>_part`;
    - `holds_<predicate>` of each goal predicate, and whether the gripper touches (`touched_<object>`) and grasps
      (`grasped_<object>`) each object to be moved.

    The simulation is deterministic: trajectories do not depend on `seed`.
    """

    def __init__(self, spec: TaskSpec, options: LiberoOptions):
        assets = install.find_assets(options.libero_assets)
        libero = install.import_libero(assets)
        # After the import of LIBERO: these need robosuite.
        from rlvla.envs.robosuite.sim import BUILD_SEED, RobosuiteSim, numpy_seed, physics_only, with_edited_xml

        bddl = install.bddl_file(spec.suite, spec.name)
        kind = libero.bddl_utils.get_problem_info(str(bddl))["problem_name"]
        task_class = with_edited_xml(
            libero.TASK_MAPPING[kind], partial(_lighter, fast=options.render_quality == "fast")
        )
        # Building a scene places fixtures at random: use the same seed in all processes.
        with numpy_seed(BUILD_SEED), contextlib.redirect_stdout(io.StringIO()), install.assets_complete(assets):
            env = task_class(str(bddl), robots=["Panda"], **physics_only(CONTROL_FREQ))
        env.visualize(vis_settings=dict.fromkeys(env._visualizations, False))  # hide the gripper markers
        simulator = RobosuiteSim(env)
        self._states = install.init_states(spec.suite, spec.name)
        size = 1 + simulator.model.nq + simulator.model.nv
        if self._states.shape != (NUM_INIT_STATES, size):
            raise ConfigError(
                f"{spec.suite} task {spec.task_id} has initial states {list(self._states.shape)}, not "
                f"{[NUM_INIT_STATES, size]}. Install the pinned hf-libero: examples/scripts/install_libero.sh"
            )
        self._goal = [(proposition_of(state), state) for state in env.parsed_problem["goal_state"]]
        facts = TaskFacts.of(bddl.read_text(encoding="utf-8"))
        self._moved = {
            name: (env.obj_body_id[name], simulator.geom_ids(env.objects_dict[name].contact_geoms))
            for name in facts.moved
        }
        self._operated = {name: simulator.geom_ids(env.fixtures_dict[name].contact_geoms) for name in facts.operated}
        self._resting: dict[str, float] = {}  # heights in meters
        self._geometry: SceneGeometry | None = None  # see `privileged_state`
        self._hand = simulator.model.body(env.robots[0].robot_model.eef_name).id
        self._base = simulator.model.body(env.robots[0].robot_model.root_body).id
        super().__init__(spec, options, simulator, CAMERAS, options.success_hold_steps, show_sites=True)
        self._settle_steps = options.settle_steps

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, 50)."""
        self._require_open()
        check_init_state_id(self.task, init_state_id)
        self._sim.restore(self._states[init_state_id])
        for _ in range(self._settle_steps):
            self._sim.step(NOOP)
        self._sim.env._post_process()
        self._resting = {name: float(self._sim.data.xpos[body][2]) for name, (body, _) in self._moved.items()}
        self._runner.begin()
        return self._observe()

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state for scripted experts; see the class docstring for the keys."""
        self._require_open()
        from rlvla.envs.libero.scene import SceneGeometry, quat_of  # imports mujoco

        if self._geometry is None:
            self._geometry = SceneGeometry(self._sim)
        data, env = self._sim.data, self._sim.env
        state = self._geometry.read()
        state["base_pos"] = data.xpos[self._base].copy()
        state["eef_pos"] = data.site_xpos[self._sim.eef_site].copy()
        state["eef_quat"] = quat_of(data.site_xmat[self._sim.eef_site])
        state["gripper_qpos"] = data.qpos[self._sim.gripper_qpos_index]
        for name, predicate in self._goal:
            state[f"holds_{name}"] = np.array(bool(env._eval_predicate(predicate)))
        for name, (_, geoms) in self._moved.items():
            state[f"touched_{name}"] = np.array(self._sim.touching(self._sim.gripper_geoms, geoms))
            state[f"grasped_{name}"] = np.array(self._sim.grasped(geoms))
        return state

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        self._sim.step(action)
        env = self._sim.env
        env._post_process()  # e.g. the flame of a stove that was turned on
        holds = [(name, bool(env._eval_predicate(state))) for name, state in self._goal]
        events = frozenset(name for name, value in holds if value)
        return all(value for _, value in holds), events | self._stages()

    def _stages(self) -> frozenset[str]:
        """Propositions about the gripper and the moved objects and operated fixtures of the goal."""
        sim = self._sim
        hand = sim.data.site_xpos[sim.eef_site]
        stages: list[tuple[str, str]] = []
        for name, (body, geoms) in self._moved.items():
            position = sim.data.xpos[body]
            distance = float(np.linalg.norm(position - hand))
            grasped = distance < GRASPABLE and sim.grasped(geoms)
            near = grasped or distance < NEAR
            holds = {"near": near, "grasped": grasped, "lifted": position[2] - self._resting[name] > LIFTED}
            stages += [(kind, name) for kind, value in holds.items() if value]
        touched = [name for name, geoms in self._operated.items() if sim.touching(sim.gripper_geoms, geoms)]
        stages += [("touched", name) for name in touched]
        return frozenset(kind for kind, _ in stages) | frozenset(f"{kind}_{name}" for kind, name in stages)

    def _proprio(self) -> np.ndarray:
        data = self._sim.data
        w, x, y, z = data.xquat[self._hand]
        rotation = axis_angle(np.array([x, y, z, w]))
        position, fingers = data.site_xpos[self._sim.eef_site], data.qpos[self._sim.gripper_qpos_index]
        return np.concatenate([position, rotation, fingers]).astype(np.float32)


def _lighter(xml: str, *, fast: bool) -> str:
    """Simplify all visual meshes and textures; the robot's meshes first as in robosuite's suite."""
    if not fast:
        return xml
    import robosuite

    from rlvla.envs.mujoco.light_assets import lighten_assets
    from rlvla.envs.mujoco.light_meshes import lighten_visual_meshes

    return lighten_assets(lighten_visual_meshes(xml, below=Path(robosuite.__file__).parent))


def make(suite: str, task_id: int, **kw) -> LiberoEnv:
    """Create the environment of a task; `kw` are the fields of `LiberoOptions`. Raises as `make_env`."""
    return LiberoEnv(task_of(suite, list_tasks(suite, **kw), task_id), LiberoOptions(**kw))

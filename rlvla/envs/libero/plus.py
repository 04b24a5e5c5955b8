"""LIBERO-plus: suites `libero_plus_spatial`, `_object`, `_goal` and `_10`, 10,030 perturbed tasks of LIBERO.

Tasks and what is perturbed in them are those of the package's `task_classification.json`, each once. Scenes, cameras
and noise come from its own environment, which renders every step.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_chunk, check_init_state_id, task_of
from rlvla.envs.chunks import SUCCESS_REWARD, ChunkRunner
from rlvla.envs.libero import install
from rlvla.envs.libero.env import (
    ACTION_DIM,
    CAMERAS,
    CONTROL_FREQ,
    MAX_STEPS,
    NOOP,
    NUM_INIT_STATES,
    PROPRIO_DIM,
    LiberoOptions,
    TaskFacts,
    axis_angle,
    instruction_of,
    proposition_of,
)
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.seeding import derive_seed

# Suite -> what the package calls it; its LIBERO-90 has no perturbed tasks.
SUITES = {f"libero_plus_{name}": f"libero_{name}" for name in ("spatial", "object", "goal", "10")}
CLASSIFICATION = "benchmark/task_classification.json"
# How a name says what is perturbed: at its end, a view perhaps after another wording.
_VIEW = re.compile(r"_view(?:_-?\d+){5}_initstate_(?P<robot>\d+)(?:_noise_(?P<noise>\d+))?$")
_LANGUAGE = re.compile(r"_language_\d+$")
_LAYOUT = re.compile(r"(?:_add_\d+|(?:_moved)?_level\d+_sample\d+)$")
_LOOK = re.compile(r"_(?:light|table|tb)_\d+$")


@dataclass(frozen=True)
class Variant:
    """A perturbed task, read from its name.

    Attributes:
        name: of the perturbed task.
        base: of the task of LIBERO.
        defined_by: name of the BDDL definition: cameras, robots and noise have none of their own.
        own_layout: objects stand elsewhere, in a single initial state of its own.
        robot: number of the arm's posture at the start; 0: LIBERO's.
        noise: kind and strength of the noise in images; 0: none.
    """

    name: str
    base: str
    defined_by: str
    own_layout: bool
    robot: int
    noise: int

    @classmethod
    def of(cls, name: str) -> Variant:
        """Read a name."""
        view = _VIEW.search(name)
        defined_by = _VIEW.sub("", name)
        base = _LOOK.sub("", _LAYOUT.sub("", _LANGUAGE.sub("", defined_by)))
        numbers = (0, 0) if view is None else (int(view["robot"]), int(view["noise"] or 0))
        return cls(name, base, defined_by, bool(_LAYOUT.search(name)), *numbers)

    @property
    def retold(self) -> bool:
        """Whether its instruction is the definition's instead of that of the task of LIBERO."""
        return bool(_LANGUAGE.search(self.defined_by))


@dataclass(frozen=True)
class LiberoPlusOptions(LiberoOptions):
    """Options of the suites. `render_quality` has no effect: the package renders by itself."""

    known_cameras: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    needs_camera: ClassVar[bool] = True
    can_play_on: ClassVar[bool] = True


def list_tasks(suite: str, **kw) -> list[TaskSpec]:
    """The tasks of a suite in the order of the package; `kw` are the fields of `LiberoPlusOptions`.

    Raises:
        MissingExtraError: LIBERO is not installed.
        ConfigError: it is not LIBERO-plus.
    """
    options = LiberoPlusOptions(**kw)
    return [replace(spec, max_steps=options.max_steps or spec.max_steps) for spec in _specs(suite)]


@cache
def _specs(suite: str) -> tuple[TaskSpec, ...]:
    """The tasks of a suite with their published step limits."""
    path = install.package_folder() / CLASSIFICATION
    if not path.is_file():
        raise ConfigError.of(
            "task_suite_name",
            "unavailable",
            f"--task_suite_name {suite}: the installed LIBERO is not LIBERO-plus, {CLASSIFICATION} is missing. It "
            "needs an interpreter of its own: see docs/environments/libero.md, and name it with --env_python",
        )
    folder, limit = SUITES[suite], MAX_STEPS[SUITES[suite]]
    entries = sorted(read_json(path)[folder], key=lambda entry: entry["id"])
    facts: dict[str, tuple[TaskFacts, str]] = {}  # many tasks share a definition
    specs = []
    for task_id, entry in enumerate(entries):
        variant = Variant.of(entry["name"])
        if variant.defined_by not in facts:
            text = install.bddl_file(folder, variant.defined_by).read_text(encoding="utf-8")
            facts[variant.defined_by] = TaskFacts.of(text), install.language_of(text)
        goal, language = facts[variant.defined_by]
        specs.append(
            TaskSpec(
                suite=suite,
                task_id=task_id,
                name=variant.name,
                instruction=language if variant.retold else instruction_of(variant.base),
                max_steps=limit,
                num_init_states=1 if variant.own_layout else NUM_INIT_STATES,
                action_dim=ACTION_DIM,
                proprio_dim=PROPRIO_DIM,
                control_freq=CONTROL_FREQ,
                propositions=tuple(map(proposition_of, goal.goal)),
                images_flipped_vertically=True,
                gripper_dims=(ACTION_DIM - 1,),
                machine="goals",
                reward_range=SUCCESS_REWARD,
                category=entry["category"],
            )
        )
    return tuple(specs)


def initial_states(suite: str, variant: Variant) -> np.ndarray:
    """The initial states [M, 1 + nq + nv] of a task: the only one of its layout, or those of the task of LIBERO."""
    folder = SUITES[suite]
    if variant.own_layout:
        return install.init_states(f"libero_newobj/{folder}", variant.name).reshape(1, -1)
    return install.init_states(folder, variant.base)


class LiberoPlusEnv:
    """One perturbed task, in the package's environment.

    Actions, images and proprio are those of `LiberoEnv`. Noise depends on the initial state alone. An arm that starts
    in another posture keeps it: the stored state, which the package's own evaluation writes over it, has LIBERO's.

    Args:
        spec: the task, including the step limit.
        options: validated options.
    """

    def __init__(self, spec: TaskSpec, options: LiberoPlusOptions):
        self.task, self._options = spec, options
        self._variant = Variant.of(spec.name)
        self._states = initial_states(spec.suite, self._variant)
        self._simulator: Any = _simulator_class(options)(
            bddl_file_name=str(install.bddl_file(SUITES[spec.suite], spec.name)),
            # Noise is made in the picture of the first one, whether it is shown or not.
            camera_names=list(dict.fromkeys(["agentview", *(CAMERAS[name] for name in options.cameras)])),
            camera_heights=options.image_size,
            camera_widths=options.image_size,
        )
        self._runner = ChunkRunner(spec.max_steps, options.success_hold_steps, plays_on=options.plays_on)
        self._seen: Mapping[str, Any] = {}
        self._random = np.random.RandomState()

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode; `seed` has no effect. ValueError for an `init_state_id` outside [0, num_init_states)."""
        self._require_open()
        check_init_state_id(self.task, init_state_id)
        self._random = np.random.RandomState(derive_seed(self.task.suite, self.task.task_id, init_state_id) % 2**32)
        with self._own_randomness(), contextlib.redirect_stdout(io.StringIO()):
            self._simulator.reset()
        state = self._states[init_state_id].copy()
        if self._variant.robot:
            joints = np.asarray(self._simulator.robots[0]._ref_joint_pos_indexes)
            state[1 + joints] = self._simulator.sim.data.qpos[joints]
        self._seen = self._simulator.set_init_state(state)
        for _ in range(self._options.settle_steps):
            self._step(NOOP)
        self._runner.begin()
        return self._observe()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, 7] until done; see `Env.step_chunk`."""
        self._require_open()
        actions = check_chunk(actions, self.task)
        self._runner.require_episode()
        frame: Callable[[], np.ndarray] | None = (lambda: self._images()[0]) if record_frames else None
        return self._runner.play(actions, self._advance, self._observe, frame)

    def privileged_state(self) -> dict[str, np.ndarray]:
        """`eef_pos` [3] and `gripper_qpos` [2]."""
        self._require_open()
        self._runner.require_episode()
        seen = self._seen
        return {"eef_pos": np.array(seen["robot0_eef_pos"]), "gripper_qpos": np.array(seen["robot0_gripper_qpos"])}

    def close(self) -> None:
        """Release the simulator. Safe to call twice."""
        if self._simulator is not None:
            self._runner.end()
            self._simulator.close()
            self._simulator = None

    def _require_open(self) -> None:
        if self._simulator is None:
            raise RuntimeError("the environment has been closed")

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        self._step(action)
        inner = self._simulator.env
        goal = inner.parsed_problem["goal_state"]
        held = frozenset(proposition_of(state) for state in goal if inner._eval_predicate(state))
        return bool(self._simulator.check_success()), held

    def _step(self, action: np.ndarray) -> None:
        with self._own_randomness():
            self._seen = self._simulator.step(action)[0]

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Inside the block numpy's global generator, from which noise is drawn, is this episode's."""
        before = np.random.get_state()
        np.random.set_state(self._random.get_state())
        try:
            yield
        finally:
            self._random.set_state(np.random.get_state())
            np.random.set_state(before)

    def _images(self) -> np.ndarray:
        """[N, H, W, 3] uint8, bottom row first."""
        return np.stack([np.asarray(self._seen[f"{CAMERAS[name]}_image"], np.uint8) for name in self._options.cameras])

    def _observe(self) -> Observation:
        proprio = None
        if self._options.use_proprio:
            seen = self._seen
            parts = seen["robot0_eef_pos"], axis_angle(seen["robot0_eef_quat"]), seen["robot0_gripper_qpos"]
            proprio = np.concatenate(parts).astype(np.float32)
        return Observation(self._images(), proprio, self.task.instruction)


def _simulator_class(options: LiberoPlusOptions) -> Any:
    """The package's environment."""
    return install.import_libero(install.find_assets(options.libero_assets)).OffScreenRenderEnv


def make(suite: str, task_id: int, **kw) -> LiberoPlusEnv:
    """Create the environment of a task; `kw` are the fields of `LiberoPlusOptions`."""
    return LiberoPlusEnv(task_of(suite, list_tasks(suite, **kw), task_id), LiberoPlusOptions(**kw))

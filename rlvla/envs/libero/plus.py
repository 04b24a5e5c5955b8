"""LIBERO-plus: suites `libero_plus_spatial`, `_object`, `_goal` and `_10`, 10,030 perturbed tasks of LIBERO.

Tasks and perturbations are listed in the package's `task_classification.json`. Scenes, cameras and noise come from the
package's environment, which renders every step.
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
from rlvla.envs.chunks import ChunkRunner
from rlvla.envs.libero import install
from rlvla.envs.libero.env import (
    CAMERAS,
    MAX_STEPS,
    NOOP,
    NUM_INIT_STATES,
    LiberoOptions,
    TaskFacts,
    axis_angle,
    instruction_of,
    libero_task,
    proposition_of,
)
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.seeding import derive_seed

# Suite -> its name in the package, where LIBERO-90 has no perturbed tasks.
SUITES = {f"libero_plus_{name}": f"libero_{name}" for name in ("spatial", "object", "goal", "10")}
CLASSIFICATION = "benchmark/task_classification.json"
# Suffixes of task names that encode the perturbation.
_VIEW = re.compile(r"_view(?:_-?\d+){5}_initstate_(?P<robot>\d+)(?:_noise_(?P<noise>\d+))?$")
_LANGUAGE = re.compile(r"_language_\d+$")
_LAYOUT = re.compile(r"(?:_add_\d+|(?:_moved)?_level\d+_sample\d+)$")
_LOOK = re.compile(r"_(?:light|table|tb)_\d+$")


@dataclass(frozen=True)
class Variant:
    """A perturbed task, parsed from its name.

    Attributes:
        name: name of the perturbed task.
        base: name of the original task of LIBERO.
        defined_by: name of the BDDL definition, without perturbations of camera, robot and noise.
        own_layout: whether objects are rearranged, in a single initial state.
        robot: number of the arm's initial posture; 0: LIBERO's.
        noise: kind and strength of the image noise; 0: none.
    """

    name: str
    base: str
    defined_by: str
    own_layout: bool
    robot: int
    noise: int

    @classmethod
    def of(cls, name: str) -> Variant:
        """Parse a name."""
        view = _VIEW.search(name)
        defined_by = _VIEW.sub("", name)
        base = _LOOK.sub("", _LAYOUT.sub("", _LANGUAGE.sub("", defined_by)))
        numbers = (0, 0) if view is None else (int(view["robot"]), int(view["noise"] or 0))
        return cls(name, base, defined_by, bool(_LAYOUT.search(name)), *numbers)

    @property
    def has_language_variant(self) -> bool:
        """Whether the instruction is the definition's instead of the original one."""
        return bool(_LANGUAGE.search(self.defined_by))


@dataclass(frozen=True)
class LiberoPlusOptions(LiberoOptions):
    """Options of the suites. `render_quality` has no effect on the package's renderer."""

    needs_camera: ClassVar[bool] = True


def list_tasks(suite: str, **kw) -> list[TaskSpec]:
    """The tasks of a suite in the order of the package; `kw` are the fields of `LiberoPlusOptions`.

    Raises:
        MissingExtraError: LIBERO is not installed.
        ConfigError: the installed LIBERO is not LIBERO-plus.
    """
    options = LiberoPlusOptions(**kw)
    return [replace(spec, max_steps=options.max_steps or spec.max_steps) for spec in _specs(suite)]


@cache
def _specs(suite: str) -> tuple[TaskSpec, ...]:
    """The tasks of a suite with their published step limits."""
    path = install.package_folder() / CLASSIFICATION
    if not path.is_file():
        text = (
            f"--task_suite_name {suite}: the installed LIBERO is not LIBERO-plus, {CLASSIFICATION} is missing. "
            "Install it in a separate interpreter (docs/environments/libero.md) and select it with --env_python"
        )
        raise ConfigError.of("task_suite_name", "unavailable", text)
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
            libero_task(
                suite=suite,
                task_id=task_id,
                name=variant.name,
                instruction=language if variant.has_language_variant else instruction_of(variant.base),
                max_steps=limit,
                num_init_states=1 if variant.own_layout else NUM_INIT_STATES,
                propositions=tuple(map(proposition_of, goal.goal)),
                category=entry["category"],
            )
        )
    return tuple(specs)


class LiberoPlusEnv:
    """One perturbed task in the package's environment.

    Actions, images and proprio as in `LiberoEnv`. Noise depends on the initial state only. A perturbed arm posture is
    kept, whereas the package's evaluation overwrites it with the stored state, which has LIBERO's.
    """

    def __init__(self, spec: TaskSpec, options: LiberoPlusOptions):
        self.task, self._options = spec, options
        self._variant = Variant.of(spec.name)
        folder = SUITES[spec.suite]
        if self._variant.own_layout:
            self._states = install.init_states(f"libero_newobj/{folder}", spec.name).reshape(1, -1)
        else:
            self._states = install.init_states(folder, self._variant.base)  # [M, 1 + nq + nv]
        libero = install.import_libero(install.find_assets(options.libero_assets))
        self._simulator: Any = libero.OffScreenRenderEnv(
            bddl_file_name=str(install.bddl_file(folder, spec.name)),
            # Noise is added to the image of the first camera, which must be agentview.
            camera_names=list(dict.fromkeys(["agentview", *(CAMERAS[name] for name in options.cameras)])),
            camera_heights=options.image_size,
            camera_widths=options.image_size,
        )
        self._runner = ChunkRunner(spec.max_steps, options.success_hold_steps, plays_on=options.plays_on)
        self._last: Mapping[str, Any] = {}  # the simulator's last observation
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
        self._last = self._simulator.set_init_state(state)
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
        eef, gripper = self._last["robot0_eef_pos"], self._last["robot0_gripper_qpos"]
        return {"eef_pos": np.array(eef), "gripper_qpos": np.array(gripper)}

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
            self._last = self._simulator.step(action)[0]

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Use the episode's random state in NumPy's global generator, from which the noise is drawn."""
        before = np.random.get_state()
        np.random.set_state(self._random.get_state())
        try:
            yield
        finally:
            self._random.set_state(np.random.get_state())
            np.random.set_state(before)

    def _images(self) -> np.ndarray:
        """[N, H, W, 3] uint8, bottom row first."""
        return np.stack([np.asarray(self._last[f"{CAMERAS[name]}_image"], np.uint8) for name in self._options.cameras])

    def _observe(self) -> Observation:
        proprio = None
        if self._options.use_proprio:
            last = self._last
            vectors = last["robot0_eef_pos"], axis_angle(last["robot0_eef_quat"]), last["robot0_gripper_qpos"]
            proprio = np.concatenate(vectors).astype(np.float32)
        return Observation(self._images(), proprio, self.task.instruction)


def make(suite: str, task_id: int, **kw) -> LiberoPlusEnv:
    """Create the environment of a task; `kw` are the fields of `LiberoPlusOptions`."""
    return LiberoPlusEnv(task_of(suite, list_tasks(suite, **kw), task_id), LiberoPlusOptions(**kw))

"""RoboTwin 2.0 as an rlvla environment: suite `robotwin`, two arms, joint targets.

Written for RoboTwin's documented interface and tested with a small environment that implements it
(tests/support/small_robotwin); not yet run with the real simulator.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlvla.envs.base import TaskSpec, task_of
from rlvla.envs.chunks import SUCCESS_REWARD
from rlvla.envs.options import SuiteOptions
from rlvla.envs.robotwin.single_step import SingleStepEnv, View
from rlvla.envs.splits import HELD_OUT_FRACTION
from rlvla.utils.cli.flags import arg
from rlvla.utils.data_files import read_json, read_yaml
from rlvla.utils.errors import ConfigError, Problem

SUITE = "robotwin"
CAMERAS = ("head_camera", "left_camera", "right_camera")
# Per arm: six joint angles in radians, and the gripper opening in [0, 1].
ACTION_DIM = PROPRIO_DIM = 14
ACTION_LIMIT = 2 * math.pi
CONTROL_FREQ = 250 / 15  # physics steps per second / physics steps per recorded action
IMAGE_SIZE = 224
DEFAULT_STEPS = 1000  # RoboTwin's default for tasks without a limit
NUM_INIT_STATES = 1000
# The last fifth of the initial states is held out (rlvla.envs.splits) and uses the seeds, backgrounds and instructions
# of RoboTwin's evaluation, the others those of its data collection.
FIRST_EVAL_STATE = NUM_INIT_STATES - round(HELD_OUT_FRACTION * NUM_INIT_STATES)
FIRST_EVAL_SEED = 100_000
# Seed increment of the next scene if a scene is unstable or the planner cannot solve it, and maximum number of scenes.
SEED_STRIDE, MAX_SCENES = 1_000_000, 20


def find_root(robotwin_root: str | None) -> Path:
    """Folder of a RoboTwin checkout: `robotwin_root` or `$ROBOTWIN_ROOT`; ConfigError if it is not a checkout."""
    folder = robotwin_root or os.environ.get("ROBOTWIN_ROOT")
    if not folder:
        raise ConfigError(
            "RoboTwin is not a Python package: give its folder with --robotwin_root or the variable ROBOTWIN_ROOT"
        )
    root = Path(folder).resolve()
    if missing := [name for name in ("envs", "task_config", "description") if not (root / name).is_dir()]:
        raise ConfigError(f"{root} is not a RoboTwin 2.0 folder: it has no {', '.join(missing)}")
    return root


def simulator_seed(init_state_id: int, scene: int = 0) -> int:
    """RoboTwin's seed for an initial state; `scene` is the number of scenes skipped before."""
    held_out = init_state_id >= FIRST_EVAL_STATE
    base = FIRST_EVAL_SEED + init_state_id - FIRST_EVAL_STATE if held_out else init_state_id
    return base + scene * SEED_STRIDE


def _read_yaml(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} of RoboTwin holds no settings")
    return content


@dataclass(frozen=True)
class RobotwinOptions(SuiteOptions):
    """Options of the suite. `render_quality` has no effect: RoboTwin sets the ray tracing options.

    Attributes:
        robotwin_root: folder of the checkout.
        robotwin_config: name of a file in the checkout's `task_config` folder.
    """

    known_cameras: ClassVar[tuple[str, ...]] = CAMERAS
    needs_camera: ClassVar[bool] = True

    cameras: tuple[str, ...] = CAMERAS[:1]
    image_size: int = IMAGE_SIZE
    success_hold_steps: int = 1
    robotwin_root: str | None = arg(
        None, "folder of a RoboTwin 2.0 checkout (default: $ROBOTWIN_ROOT)", metavar="DIR", recorded=False
    )
    robotwin_config: str = arg("demo_clean", "RoboTwin's task configuration", metavar="NAME")

    def problems(self) -> list[Problem]:
        """Also reject a configuration outside of RoboTwin's folder: the recorded name decides which code runs."""
        problems = super().problems()
        if Path(self.robotwin_config).name != self.robotwin_config:
            text = f"--robotwin_config {self.robotwin_config}: give the name of a file in task_config, without folders"
            problems.append(Problem("robotwin_config", "unknown_name", text))
        return problems


def list_tasks(**kw) -> list[TaskSpec]:
    """Tasks of a checkout with a class in `envs/` and instructions in `description/`, sorted by name."""
    options = RobotwinOptions(**kw)
    root = find_root(options.robotwin_root)
    if not (root / "task_config" / f"{options.robotwin_config}.yml").is_file():
        configs = sorted(path.stem for path in (root / "task_config").glob("[!_]*.yml"))
        raise ConfigError(f"--robotwin_config {options.robotwin_config}: RoboTwin has {', '.join(configs)}")
    limits_file = root / "task_config" / "_eval_step_limit.yml"
    limits = _read_yaml(limits_file) if limits_file.is_file() else {}
    sentences = sorted((root / "description" / "task_instruction").glob("*.json"))
    tasks = [path for path in sentences if (root / "envs" / path.name).with_suffix(".py").is_file()]
    if not tasks:
        raise ConfigError(f"{root} has no task: none is both in envs/ and in description/task_instruction/")
    return [
        TaskSpec(
            suite=SUITE,
            task_id=task_id,
            name=path.stem,
            instruction=read_json(path).get("full_description") or path.stem.replace("_", " "),
            max_steps=options.max_steps or int(limits.get(path.stem, DEFAULT_STEPS)),
            num_init_states=NUM_INIT_STATES,
            action_dim=ACTION_DIM,
            proprio_dim=PROPRIO_DIM,
            control_freq=CONTROL_FREQ,
            propositions=("success",),
            action_limit=ACTION_LIMIT,
            reward_range=SUCCESS_REWARD,
        )
        for task_id, path in enumerate(tasks)
    ]


def settings_of(root: Path, name: str, config: str) -> dict[str, Any]:
    """Keyword arguments of `setup_demo`: the task configuration completed with the robot and camera configurations."""
    folder = root / "task_config"
    settings = _read_yaml(folder / f"{config}.yml")
    robots = _read_yaml(folder / "_embodiment_config.yml")
    camera = _read_yaml(folder / "_camera_config.yml")[settings["camera"]["head_camera_type"]]
    arms = settings["embodiment"]
    if len(arms) not in (1, 3):
        raise ConfigError(f"task_config/{config}.yml of RoboTwin: embodiment must have 1 or 3 entries, not {arms}")
    left, right = (str(robots[arm]["file_path"]) for arm in (arms[0], arms[0 if len(arms) == 1 else 1]))
    settings |= {
        "task_name": name,
        "task_config": config,
        "head_camera_h": camera["h"],
        "head_camera_w": camera["w"],
        "left_robot_file": left,
        "right_robot_file": right,
        "dual_arm_embodied": len(arms) == 1,
        "left_embodiment_config": _read_yaml(root / left / "config.yml"),
        "right_embodiment_config": _read_yaml(root / right / "config.yml"),
        "render_freq": 0,
        "save_data": False,
    }
    if len(arms) == 3:
        settings["embodiment_dis"] = arms[2]
    return settings


class Scenes:
    """Start of episodes: finds a solvable scene for an initial state and its instruction, as RoboTwin does.

    RoboTwin's planner must play a scene once to determine its objects and whether it is stable and solvable. The result
    is cached for the lifetime of the process.

    Args:
        root: folder of the RoboTwin checkout.
        name: name of the task.
        settings: keyword arguments from `settings_of`.
    """

    def __init__(self, root: Path, name: str, settings: dict[str, Any]):
        self._root, self._name, self._settings = root, name, settings
        self._solvable: dict[int, tuple[int, str]] = {}  # initial state -> seed of the scene, instruction
        self._running = False

    def begin(self, simulator: Any, init_state_id: int, seed: int) -> str:
        """Set up the scene of an initial state and return its instruction; `seed` has no effect (scenes have seeds)."""
        with working_directory(self._root):
            if init_state_id not in self._solvable:
                self._solvable[init_state_id] = self._search(simulator, init_state_id)
            scene_seed, instruction = self._solvable[init_state_id]
            self._set_up(simulator, init_state_id, scene_seed)
            if hasattr(simulator, "set_instruction"):
                simulator.set_instruction(instruction=instruction)
        return instruction

    def _set_up(self, simulator: Any, init_state_id: int, scene_seed: int) -> None:
        if self._running:
            simulator.close_env()
        self._running = True
        held_out = init_state_id >= FIRST_EVAL_STATE
        settings = {**self._settings, "eval_mode": held_out}
        simulator.setup_demo(now_ep_num=init_state_id, seed=scene_seed, is_test=held_out, **settings)

    def _search(self, simulator: Any, init_state_id: int) -> tuple[int, str]:
        problem: Exception | None = None
        for scene in range(MAX_SCENES):
            scene_seed = simulator_seed(init_state_id, scene)
            try:  # unstable, or the planner failed: RoboTwin also skips to the next scene
                self._set_up(simulator, init_state_id, scene_seed)
                played = simulator.play_once()
                solved = simulator.plan_success and simulator.check_success()
            except Exception as error:
                problem = error
                continue
            if solved:
                return scene_seed, self._sentence(played["info"], init_state_id)
        last = f"; the last error: {type(problem).__name__}: {problem}" if problem else ""
        raise RuntimeError(
            f"none of {MAX_SCENES} scenes of {self._name}, initial state {init_state_id}, can be solved{last}"
        ) from problem

    def _sentence(self, info: Mapping[str, Any], init_state_id: int) -> str:
        """Sample the instruction of an initial state with Python's global generator, as RoboTwin does."""
        describe = importlib.import_module("generate_episode_instructions").generate_episode_descriptions
        kind = "unseen" if init_state_id >= FIRST_EVAL_STATE else "seen"
        before = random.getstate()
        random.seed(init_state_id)
        try:
            return str(describe(self._name, [info], 1)[0][kind][0])
        finally:
            random.setstate(before)


@contextlib.contextmanager
def working_directory(folder: Path) -> Iterator[None]:
    """Change the working directory; RoboTwin opens files by paths relative to its folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _simulator(root: Path, name: str) -> Any:
    """Create an instance of the task's class."""
    for folder in (root / "description" / "utils", root):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        with working_directory(root):
            return getattr(importlib.import_module(f"envs.{name}"), name)()
    except ImportError as error:
        raise ConfigError(
            f"RoboTwin's task {name} cannot be imported: {error}. Install RoboTwin's requirements into the interpreter "
            "of the workers"
        ) from error


def make(task_id: int, **kw) -> SingleStepEnv:
    """Create the environment of a task; `kw` are the fields of `RobotwinOptions`."""
    task, options = task_of(SUITE, list_tasks(**kw), task_id), RobotwinOptions(**kw)
    root = find_root(options.robotwin_root)
    scenes = Scenes(root, task.name, settings_of(root, task.name, options.robotwin_config))
    view = View(
        options.cameras,
        options.image_size,
        options.image_fit,
        options.use_proprio,
        picture=lambda observation, camera: observation["observation"][camera]["rgb"],
        state=lambda observation: observation["joint_action"]["vector"],
    )
    return SingleStepEnv(task, _simulator(root, task.name), scenes.begin, view, options.success_hold_steps)

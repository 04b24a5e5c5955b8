"""RoboTwin 2.0 behind the environment contract: suite `robotwin`, two arms, joint targets.

Written against RoboTwin's documented interface and tested against a small environment with the same one
(tests/envs/small_robotwin.py); it has not been run with the real simulator.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.envs.older_names import OlderNamesEnv, View, task_of, view_problems
from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.splits import HELD_OUT_FRACTION
from rlvla.utils.errors import ConfigError

SUITE = "robotwin"
CAMERAS = ("head_camera", "left_camera", "right_camera")
# Per arm six joint angles in radians and the gripper's opening in [0, 1].
ACTION_DIM = PROPRIO_DIM = 14
ACTION_LIMIT = 2 * math.pi
CONTROL_FREQ = 250 / 15  # physics steps per second and per recorded action
IMAGE_SIZE = 224
DEFAULT_STEPS = 1000  # RoboTwin's own where it names no limit for a task
NUM_INIT_STATES = 1000
# The last fifth of the initial states is what is held out (rlvla.envs.splits): they get the seeds of RoboTwin's own
# evaluation, and its test-time backgrounds and sentences; the others those of its data collection.
FIRST_EVAL_STATE = NUM_INIT_STATES - round(HELD_OUT_FRACTION * NUM_INIT_STATES)
FIRST_EVAL_SEED = 100_000
# A scene that is unstable or that the planner cannot solve is passed over for the one of this many seeds further on.
SEED_STRIDE, MAX_SCENES = 1_000_000, 20


def find_root(given: str | None) -> Path:
    """The folder of a RoboTwin checkout: what is given, else `$ROBOTWIN_ROOT`; ConfigError if it is none."""
    named = given or os.environ.get("ROBOTWIN_ROOT")
    if not named:
        raise ConfigError(
            "RoboTwin is not a Python package: name its folder with --robotwin_root or the variable ROBOTWIN_ROOT"
        )
    root = Path(named).resolve()
    missing = [part for part in ("envs", "task_config", "description") if not (root / part).is_dir()]
    if missing:
        raise ConfigError(f"{root} is no RoboTwin 2.0 folder: it has no {', '.join(missing)}")
    return root


def simulator_seed(init_state_id: int, scene: int = 0) -> int:
    """RoboTwin's seed of an initial state; `scene` counts those that had to be passed over."""
    held_out = init_state_id >= FIRST_EVAL_STATE
    base = FIRST_EVAL_SEED + init_state_id - FIRST_EVAL_STATE if held_out else init_state_id
    return base + scene * SEED_STRIDE


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} of RoboTwin cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} of RoboTwin holds no settings")
    return content


def list_tasks(
    *,
    cameras: Sequence[str] = CAMERAS[:1],
    image_size: int = IMAGE_SIZE,
    use_proprio: bool = False,
    max_steps: int | None = None,
    render_quality: str = "fast",
    robotwin_root: str | None = None,
    robotwin_config: str = "demo_clean",
) -> list[TaskSpec]:
    """The tasks of a checkout, by name; those with a class in `envs/` and sentences in `description/`."""
    # Both qualities look the same here: rays and samples are set by RoboTwin.
    problems = view_problems(SUITE, CAMERAS, cameras, image_size, max_steps, render_quality)
    if problems:
        raise ConfigError(problems)
    root = find_root(robotwin_root)
    if not (root / "task_config" / f"{robotwin_config}.yml").is_file():
        known = sorted(path.stem for path in (root / "task_config").glob("[!_]*.yml"))
        raise ConfigError(f"--robotwin_config {robotwin_config}: RoboTwin has {', '.join(known)}")
    limits_file = root / "task_config" / "_eval_step_limit.yml"
    limits = _read_yaml(limits_file) if limits_file.is_file() else {}
    sentences = sorted((root / "description" / "task_instruction").glob("*.json"))
    names = [path for path in sentences if (root / "envs" / path.name).with_suffix(".py").is_file()]
    if not names:
        raise ConfigError(f"{root} holds no task: nothing stands both in envs/ and in description/task_instruction/")
    return [
        TaskSpec(
            suite=SUITE,
            task_id=task_id,
            name=path.stem,
            instruction=json.loads(path.read_text(encoding="utf-8")).get("full_description")
            or path.stem.replace("_", " "),
            max_steps=max_steps or int(limits.get(path.stem, DEFAULT_STEPS)),
            num_init_states=NUM_INIT_STATES,
            action_dim=ACTION_DIM,
            proprio_dim=PROPRIO_DIM,
            control_freq=CONTROL_FREQ,
            propositions=("success",),
            action_limit=ACTION_LIMIT,
        )
        for task_id, path in enumerate(names)
    ]


def settings_of(root: Path, name: str, config: str) -> dict[str, Any]:
    """Keyword arguments of `setup_demo`: the task configuration with the robots' and the camera's facts filled in."""
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
    """Starts episodes: finds a solvable scene for an initial state and a sentence that describes it, as RoboTwin does.

    Whether a scene is stable and solvable, and what lies in it, is known after RoboTwin's own planner has played it
    once; that is remembered as long as the process lives.

    Args:
        root: the checkout.
        name: the task.
        settings: see `settings_of`.
    """

    def __init__(self, root: Path, name: str, settings: dict[str, Any]):
        self._root, self._name, self._settings = root, name, settings
        self._known: dict[int, tuple[int, str]] = {}
        self._running = False

    def begin(self, simulator: Any, init_state_id: int, seed: int) -> str:
        """Set the scene of an initial state; returns the instruction. `seed` changes nothing: the scene has its own."""
        with working_directory(self._root):
            if init_state_id not in self._known:
                self._known[init_state_id] = self._search(simulator, init_state_id)
            scene_seed, instruction = self._known[init_state_id]
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
            try:  # an unstable scene, or one that the planner fails in: RoboTwin goes to the next one, too
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
        """A sentence of the initial state's own: RoboTwin draws from Python's global generator."""
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
    """RoboTwin opens its files by paths relative to its own folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _picture(seen: Mapping[str, Any], camera: str) -> np.ndarray:
    return seen["observation"][camera]["rgb"]


def _state(seen: Mapping[str, Any]) -> np.ndarray:
    return seen["joint_action"]["vector"]


def _simulator(root: Path, name: str) -> Any:
    """An instance of the task's class."""
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


def make(
    task_id: int,
    *,
    cameras: Sequence[str] = CAMERAS[:1],
    image_size: int = IMAGE_SIZE,
    use_proprio: bool = False,
    robotwin_root: str | None = None,
    robotwin_config: str = "demo_clean",
    max_steps: int | None = None,
    render_quality: str = "fast",
) -> OlderNamesEnv:
    """Build the environment of one task; the options are those of `list_tasks`."""
    listed = partial(list_tasks, robotwin_root=robotwin_root, robotwin_config=robotwin_config, max_steps=max_steps)
    tasks = listed(cameras=cameras, image_size=image_size, render_quality=render_quality)
    task, root = task_of(SUITE, tasks, task_id), find_root(robotwin_root)
    scenes = Scenes(root, task.name, settings_of(root, task.name, robotwin_config))
    view = View(tuple(cameras), image_size, use_proprio, _picture, _state)
    return OlderNamesEnv(task, _simulator(root, task.name), scenes.begin, view)


register_suite(SUITE, Suite(list_tasks=list_tasks, make=make, cameras=CAMERAS, image_size=IMAGE_SIZE))

"""robosuite as an rlvla environment: suite `robosuite`, a Panda arm under OSC_POSE."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_init_state_id, task_of
from rlvla.envs.chunks import SUCCESS_REWARD
from rlvla.envs.mujoco.arm_env import MujocoArmEnv
from rlvla.envs.mujoco.cameras import add_camera
from rlvla.envs.perturbations import PerturbedOptions, Surface, levels
from rlvla.envs.robosuite.facts import WipeFacts
from rlvla.envs.robosuite.importing import import_robosuite
from rlvla.envs.robosuite.primitives import (
    AFFORDANCE,
    EPISODE_SECONDS,
    PRIMITIVES,
    PrimitiveController,
    action_dim,
    affordance,
    macro_steps,
)
from rlvla.envs.robosuite.robot_state import WIDTHS
from rlvla.envs.robosuite.tasks import TASKS, RobosuiteTask
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import ConfigError, Problem

SUITE = "robosuite"
# Camera name -> MuJoCo's name.
CAMERAS = {
    "agentview": "agentview",
    "wrist": "robot0_eye_in_hand",
    "closeup": "closeup",  # not in robosuite; placed by the task
    "frontview": "frontview",
    "sideview": "sideview",
    "birdview": "birdview",
    "robotview": "robot0_robotview",
}
ACTION_DIM, PROPRIO_DIM = 7, 6  # minus one without a gripper
NUM_INIT_STATES = 10_000
HOLD_SECONDS = 0.25  # how long success must last to end an episode
ACTION_SPACES = ("osc", "primitives")
_TABLE_HEIGHT = 0.8  # meters
_PHYSICS_FREQ = 500.0  # robosuite's physics steps per second


@dataclass(frozen=True)
class RobosuiteOptions(PerturbedOptions):
    """Options of the suite.

    Without cameras, nothing is rendered and no GL is needed. By default, `max_steps` follows from the task's time
    limit, and success must last a quarter of a second.

    Attributes:
        control_freq: control steps per simulated second.
        action_space: "osc" for actions of the controller, "primitives" for action primitives, see
            `rlvla.envs.robosuite.primitives`.
        primitives: names of the available primitives; () for all of the task.
        robot_state: observables that make up proprio, keys of `rlvla.envs.robosuite.robot_state.WIDTHS`; () for the
            suite's own.
        object_state: append the state of the task's objects to proprio, see `TaskFacts.object_state`.
        dense_reward: the native reward is robosuite's shaped reward, in [0, 1].
    """

    known_cameras: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    action_options: ClassVar[tuple[str, ...]] = ("action_space", "primitives")
    privileged_options: ClassVar[tuple[str, ...]] = ("object_state",)
    unplayed_options: ClassVar[tuple[str, ...]] = ("dense_reward", "robot_state", "control_freq")  # in the task
    can_play_on: ClassVar[bool] = True

    cameras: tuple[str, ...] = ("agentview",)
    control_freq: float = arg(20.0, "control steps per simulated second", minimum=1.0, maximum=_PHYSICS_FREQ)
    action_space: str = arg(
        "osc",
        "osc: displacement, rotation and gripper; primitives: reach, grasp, push, open or a single action, each with "
        "parameters",
        choices=ACTION_SPACES,
    )
    primitives: tuple[str, ...] = arg(
        (), "names of the available action primitives (default: all of the task)", nargs="+", metavar="NAME"
    )
    robot_state: tuple[str, ...] = arg(
        (),
        "proprioception as in robomimic's datasets: names of robosuite's observables, e.g. robot0_eef_pos (default: "
        "position, yaw and gripper opening)",
        nargs="+",
        metavar="NAME",
    )
    object_state: bool = arg(False, "append position and orientation of the task's objects to proprio")
    dense_reward: bool = arg(
        False, "use the shaped reward of robosuite instead of success in the reward sources env and env_progress"
    )

    def problems(self) -> list[Problem]:
        """All problems of the values."""
        problems = super().problems()
        names = [name for name, _ in PRIMITIVES]
        if unknown := [name for name in self.primitives if name not in names]:
            text = f"--primitives: there is no {', '.join(unknown)}; known: {', '.join(names)}"
            problems.append(Problem("primitives", "unknown_name", text))
        if unknown := [name for name in self.robot_state if name not in WIDTHS]:
            text = f"--robot_state: there is no {', '.join(unknown)}; known: {', '.join(WIDTHS)}"
            problems.append(Problem("robot_state", "unknown_name", text))
        if self.primitives and not self.has_primitives:
            text = "--primitives needs --action_space primitives"
            problems.append(Problem("primitives", "needs_flag", text))
        return problems

    @property
    def has_primitives(self) -> bool:
        """Whether actions are primitives."""
        return self.action_space == "primitives"


def list_tasks(**kw) -> list[TaskSpec]:
    """The tasks of the suite; `kw` are the fields of `RobosuiteOptions`."""
    options = RobosuiteOptions(**kw)
    return [_spec(task_id, task, options) for task_id, task in enumerate(TASKS)]


def task_problems(tasks: Sequence[TaskSpec], options: Mapping[str, Any]) -> list[Problem]:
    """Problems of options that some of the tasks do not support."""
    problems = []
    without = [task.name for task in tasks if not TASKS[task.task_id].has_gripper]
    if without and any("gripper" in name for name in options.get("robot_state", ())):
        text = f"--robot_state: {', '.join(without)} has no gripper; leave its observables out"
        problems.append(Problem("robot_state", "unavailable", text))
    fixed = [task.name for task in tasks if not TASKS[task.task_id].can_spread]
    if fixed and "initial_state" in levels(options.get("perturb", ())):
        text = f"--perturb initial_state: not available for {', '.join(fixed)}; leave these out"
        problems.append(Problem("perturb", "unavailable", text))
    counting = [task.name for task in tasks if TASKS[task.task_id].facts is WipeFacts]
    if counting and options.get("dense_reward"):
        text = f"--dense_reward: not available for {', '.join(counting)}, whose reward computation changes its state"
        problems.append(Problem("dense_reward", "unavailable", text))
    return problems


def _spec(task_id: int, task: RobosuiteTask, options: RobosuiteOptions) -> TaskSpec:
    osc_dim = ACTION_DIM if task.has_gripper else ACTION_DIM - 1
    seconds, dim = task.seconds, osc_dim
    proprio_dim = sum(WIDTHS[name] for name in options.robot_state) or (PROPRIO_DIM - (not task.has_gripper))
    primitives = task.primitives if options.has_primitives else ()
    if options.primitives:
        primitives = tuple(entry for entry in primitives if entry[0] in options.primitives)
    if primitives:
        seconds, dim = max(seconds, EPISODE_SECONDS), action_dim(primitives)
    return TaskSpec(
        suite=SUITE,
        task_id=task_id,
        name=task.name,
        instruction=task.instruction,
        max_steps=options.max_steps or math.ceil(seconds * options.control_freq),
        num_init_states=NUM_INIT_STATES,
        action_dim=dim,
        proprio_dim=proprio_dim + (task.facts.object_state_dim if options.object_state else 0),
        control_freq=float(options.control_freq),
        propositions=task.facts.propositions,
        gripper_dims=(ACTION_DIM - 1,) if task.has_gripper and not primitives else (),
        machine=task.machine,
        reward_range=SUCCESS_REWARD,
        dense_reward=options.dense_reward,
        primitives=primitives,
        macro_steps=macro_steps(task.workspace, options.control_freq) if primitives else 0,
        step_action_dim=osc_dim if primitives else 0,
        reward_components=(AFFORDANCE,) if primitives else (),
    )


class RobosuiteEnv(MujocoArmEnv):
    """One robosuite task.

    Actions [7] in [-1, 1]: end-effector displacement (1 = 5 cm, world axes), rotation (1 = 0.5 rad about world axes),
    gripper (sign: negative opens, positive closes, 0 holds). Wipe has no gripper: [6].

    Proprio [6]: end-effector x, y (relative to the center of the table or of the first bin) and z (above it) in meters;
    sine and cosine of its yaw; distance between the fingers in meters (absent in Wipe: [5]). With `robot_state`, these
    observables instead. With `object_state`, followed by `TaskFacts.object_state`.

    With `action_space` "primitives", see `TaskSpec.macro_steps` and `rlvla.envs.robosuite.primitives`.

    Privileged state: `eef_pos` [3], `eef_quat` [4] (w first), `gripper_qpos` [2], and the entries of the task, see
    `rlvla.envs.robosuite.facts`.

    The simulation is deterministic after the reset: trajectories do not depend on `seed`.
    """

    def __init__(self, spec: TaskSpec, options: RobosuiteOptions):
        import_robosuite()  # first: the imports below depend on it
        from rlvla.envs.mujoco.light_meshes import lighten_visual_meshes
        from rlvla.envs.robosuite.sim import RobosuiteSim, build_robosuite

        task = TASKS[spec.task_id]

        def edit_xml(xml: str) -> str:
            xml = add_camera(xml, CAMERAS["closeup"], task.closeup)
            return lighten_visual_meshes(xml) if options.render_quality == "fast" and options.cameras else xml

        simulator = RobosuiteSim(build_robosuite(spec.name, options.control_freq, edit_xml))
        if spread := levels(options.perturb).get("initial_state"):
            simulator.spread_objects(1.0 + spread)
        hold_steps = options.success_hold_steps or math.ceil(HOLD_SECONDS * options.control_freq)
        self._facts, self._shows_objects = task.facts(simulator), options.object_state
        self._robot_state = simulator.robot_state(options.robot_state) if options.robot_state else None
        table = Surface(task.workspace.low[:2], task.workspace.high[:2], _TABLE_HEIGHT)
        super().__init__(spec, options, simulator, CAMERAS, hold_steps, (table, task.paraphrases))
        if options.dense_reward:
            self._reward = simulator.shaped_reward
        self._primitives: PrimitiveController | None = None
        if spec.primitives:
            self._primitives = PrimitiveController(
                spec.primitives, task.workspace, options.control_freq, simulator.gripper_steps, self._hand
            )
        self._task_hash = zlib.crc32(f"{SUITE}/{spec.name}".encode())

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, num_init_states)."""
        self._require_open()
        check_init_state_id(self.task, init_state_id)
        self._sim.reset(np.random.default_rng((self._task_hash, init_state_id)))
        if self._primitives is not None:
            self._primitives.reset()
        return self._begin(init_state_id)

    def _play(self, actions: np.ndarray, frame: Callable[[], np.ndarray] | None) -> ChunkResult:
        if self._primitives is None:
            return super()._play(actions, frame)
        name, params = self._primitives.chosen(actions[0])
        keypoints = self._facts.keypoints().get(name, ())
        score = affordance(name, self._primitives.target(name, params), keypoints)
        steps = (step.astype(np.float32) for step in self._primitives.start(actions[0]))
        action = next(steps, None)
        step_actions: list[np.ndarray] = []

        def advance(row: np.ndarray) -> tuple[bool, frozenset[str]]:
            nonlocal action
            assert action is not None
            step_actions.append(action)
            outcome = self._advance(action)
            action = next(steps, None)
            return outcome

        result = self._runner.play(
            actions, advance, self._observe, frame, reward=self._reward, done=lambda: action is None
        )
        penalties = np.zeros(len(actions), dtype=np.float32)
        penalties[0] = score - 1.0
        result.components, result.step_actions = {AFFORDANCE: penalties}, np.stack(step_actions)
        return result

    def _hand(self) -> tuple[np.ndarray, np.ndarray]:
        """Position [3] and rotation matrix [3, 3] of the end effector."""
        data, site = self._sim.data, self._sim.eef_site
        return data.site_xpos[site], data.site_xmat[site].reshape(3, 3)

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        self._sim.step(action)
        events = self._facts.events()
        return self._facts.success in events, events

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state for scripted experts; see the class docstring for the keys."""
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
        super().close()
        self._facts = None  # type: ignore[assignment]

    def _proprio(self) -> np.ndarray:
        objects = self._facts.object_state() if self._shows_objects else np.empty(0)
        if self._robot_state is not None:
            return np.concatenate([self._robot_state(), objects], dtype=np.float32)
        data, site = self._sim.data, self._sim.eef_site
        position, mat = data.site_xpos[site] - self._facts.origin, data.site_xmat[site]
        yaw = math.atan2(mat[3], mat[0])
        fingers = data.qpos[self._sim.gripper_qpos_index]
        opening = [fingers[0] - fingers[1]] if len(fingers) else []
        return np.array([*position, math.sin(yaw), math.cos(yaw), *opening, *objects], dtype=np.float32)


def make(task_id: int, **kw) -> RobosuiteEnv:
    """Create the environment of a task; `kw` are the fields of `RobosuiteOptions`. Raises as `make_env`."""
    spec, options = task_of(SUITE, list_tasks(**kw), task_id), RobosuiteOptions(**kw)
    task = TASKS[task_id]
    if missing := [name for name in options.cameras if name in task.missing_cameras]:
        raise ConfigError(f"robosuite's {task.name} has no camera {', '.join(missing)}; choose another")
    if options.primitives and not spec.primitives:
        names = ", ".join(name for name, _ in task.primitives)
        text = f"robosuite's {task.name} has no primitive {', '.join(options.primitives)}; it has {names}"
        raise ConfigError.of("primitives", "unavailable", text)
    return RobosuiteEnv(spec, options)

"""ManiSkill 3 as an rlvla environment: suite `maniskill`, ten tabletop tasks of a Panda arm with a gripper."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_chunk, check_init_state_id, task_of
from rlvla.envs.chunks import ChunkRunner
from rlvla.envs.options import SuiteOptions
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import ConfigError, MissingExtraError, Problem

SUITE = "maniskill"
CAMERAS = ("base", "hand")
ACTION_DIM, PROPRIO_DIM = 7, 8
CONTROL_FREQ = 20.0
STEPS = 100
NUM_INIT_STATES = 10_000
REWARD_RANGE = (-1.0, 1.0)


@dataclass(frozen=True)
class ManiSkillTask:
    """A task.

    Attributes:
        name: the package's name without its version.
        instruction: what the policy is told; ours, the package has none.
        events: proposition -> entry of the package's evaluation.
        state_dim: length of the simulation state of its objects and the robot.
        hand_camera: whether its robot carries a camera.
    """

    name: str
    instruction: str
    state_dim: int
    events: Mapping[str, str] = field(default_factory=dict)
    hand_camera: bool = False

    @property
    def propositions(self) -> tuple[str, ...]:
        """Of the task, success last."""
        return (*self.events, "success")


TASKS = (
    ManiSkillTask("PushCube", "push the cube into the target", 70),
    ManiSkillTask("PullCube", "pull the cube into the target", 70),
    ManiSkillTask(
        "PickCube", "move the cube to the green ball", 70, {"grasped": "is_grasped", "placed": "is_obj_placed"}
    ),
    ManiSkillTask(
        "StackCube",
        "put the red cube on the green cube",
        70,
        {"grasped": "is_cubeA_grasped", "placed": "is_cubeA_on_cubeB"},
        hand_camera=True,
    ),
    ManiSkillTask("LiftPegUpright", "stand the peg upright", 57),
    ManiSkillTask(
        "PokeCube", "poke the cube with the peg", 83, {"grasped": "is_peg_grasped", "placed": "is_peg_cube_fit"}
    ),
    ManiSkillTask(
        "PlaceSphere", "put the ball into the bin", 70, {"grasped": "is_obj_grasped", "placed": "is_obj_on_bin"}
    ),
    ManiSkillTask("RollBall", "roll the ball to the target", 70),
    ManiSkillTask("PegInsertionSide", "insert the peg into the hole", 70, hand_camera=True),
    ManiSkillTask("PullCubeTool", "pull the cube closer with the hook", 70),
)


@dataclass(frozen=True)
class ManiSkillOptions(SuiteOptions):
    """Options of the suite.

    Rendering needs a Vulkan driver, on a CPU Mesa's lavapipe in a version newer than that of Debian 12.

    Attributes:
        object_state: append the simulation state of objects and robot to proprio.
    """

    known_cameras: ClassVar[tuple[str, ...]] = CAMERAS
    privileged_options: ClassVar[tuple[str, ...]] = ("object_state",)
    can_play_on: ClassVar[bool] = True

    cameras: tuple[str, ...] = ("base",)
    object_state: bool = arg(False, "append position and orientation of the task's objects to proprio")


def list_tasks(**kw: Any) -> list[TaskSpec]:
    """The tasks of the suite; `kw` are the fields of `ManiSkillOptions`."""
    options = ManiSkillOptions(**kw)
    return [
        TaskSpec(
            suite=SUITE,
            task_id=task_id,
            name=re.sub(r"(?<=[a-z])(?=[A-Z])", "_", task.name).lower(),
            instruction=task.instruction,
            max_steps=options.max_steps or STEPS,
            num_init_states=NUM_INIT_STATES,
            action_dim=ACTION_DIM,
            proprio_dim=PROPRIO_DIM + (task.state_dim if options.object_state else 0),
            control_freq=CONTROL_FREQ,
            propositions=task.propositions,
            gripper_dims=(ACTION_DIM - 1,),
            machine="F(grasped & F(success))" if "grasped" in task.events else "F(success)",
            reward_range=REWARD_RANGE,
        )
        for task_id, task in enumerate(TASKS)
    ]


class ManiSkillEnv:
    """One ManiSkill task, on the CPU.

    Actions [7] in [-1, 1]: where the hand shall go (1 = 10 cm per axis) and turn (1 = 0.1 rad per axis), and the
    gripper (1 opens, -1 closes); 20 Hz.

    Proprio [8]: position between the fingers in meters and rotation vector of the hand, 0 where it points down, both in
    the frame of the robot's base, and the positions of both fingers. With `object_state` the simulation state follows.

    Images show the goal, which the package hides from policies that are given its position. They are rendered once per
    chunk. An initial state is what the package draws with its number as the seed. An episode that the task fails for
    good is truncated.

    Propositions: `grasped` and `placed` where the package's evaluation has them, and `success`.

    Privileged state: `state`, all of the simulation.

    Args:
        spec: the task, including the step limit.
        options: validated options.

    Raises:
        ConfigError: a camera that its robot does not carry, or no working Vulkan driver.
        MissingExtraError: mani_skill is not installed.
    """

    def __init__(self, spec: TaskSpec, options: ManiSkillOptions):
        self.task, self.options, self._facts = spec, options, TASKS[spec.task_id]
        if "hand" in options.cameras and not self._facts.hand_camera:
            text = f"--cameras hand: the robot of {spec.name} carries no camera; take base"
            raise ConfigError([Problem("cameras", "unavailable", text)])
        self._env: Any = _simulator(self._facts.name, options)
        self._runner = ChunkRunner(spec.max_steps, options.success_hold_steps or 1, plays_on=options.plays_on)
        self._reward, self._failed, self._begun = 0.0, False, False

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, num_init_states)."""
        self._require_open()
        check_init_state_id(self.task, init_state_id)
        self._env.reset(seed=init_state_id)
        self._failed, self._begun = False, True
        self._runner.begin()
        return self._observe()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D] until done; see `Env.step_chunk`."""
        self._require_open()
        actions = check_chunk(actions, self.task)
        if record_frames and not self.options.cameras:
            raise ValueError("frames cannot be recorded: the environment was made without cameras")
        frame: Callable[[], np.ndarray] | None = (lambda: self._pictures()[0]) if record_frames else None
        parts = (self._advance, self._observe, frame)
        return self._runner.play(actions, *parts, reward=lambda: self._reward, failed=lambda: self._failed)

    def privileged_state(self) -> dict[str, np.ndarray]:
        """`state`, for scripted experts."""
        self._require_open()
        if not self._begun:
            raise RuntimeError("no episode was started: call reset first")
        return {"state": self._state()}

    def close(self) -> None:
        """Release the simulator. Safe to call twice."""
        if self._env is not None:
            self._env.close()
        self._env = None

    def _require_open(self) -> None:
        if self._env is None:
            raise RuntimeError("the environment has been closed")

    def _advance(self, action: np.ndarray) -> tuple[bool, frozenset[str]]:
        _, reward, _, _, info = self._env.step(np.asarray(action, np.float32))
        self._reward = float(reward[0])
        self._failed = "fail" in info and bool(info["fail"][0])
        holds = {name: bool(info[entry][0]) for name, entry in self._facts.events.items()}
        holds["success"] = bool(info["success"][0])
        return holds["success"], frozenset(name for name, true in holds.items() if true)

    def _observe(self) -> Observation:
        proprio = self._proprio() if self.options.use_proprio else None
        return Observation(self._pictures(), proprio, self.task.instruction)

    def _proprio(self) -> np.ndarray:
        agent = self._env.agent
        pose = agent.robot.pose.inv() * agent.tcp.pose
        parts = [pose.p[0], agent.robot.get_qpos()[0, -2:]]
        position, fingers = (np.asarray(part.cpu(), np.float32) for part in parts)
        proprio = np.concatenate([position, _turned_from_down(np.asarray(pose.q[0].cpu(), np.float64)), fingers])
        return np.concatenate([proprio, self._state()]) if self.options.object_state else proprio

    def _state(self) -> np.ndarray:
        return self._env.get_state()[0].cpu().numpy().astype(np.float32)

    def _pictures(self) -> np.ndarray:
        """[N, H, H, 3] uint8."""
        size, env = self.options.image_size, self._env
        if not self.options.cameras:
            return np.empty((0, size, size, 3), np.uint8)
        for hidden in env._hidden_objects:
            hidden.show_visual()
        env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        env.capture_sensor_data()
        sensors = [env.scene.sensors[f"{name}_camera"] for name in self.options.cameras]
        wanted = {"rgb": True, "depth": False, "position": False, "segmentation": False}
        return np.stack([sensor.get_obs(**wanted)["rgb"][0].cpu().numpy() for sensor in sensors])


def _turned_from_down(quaternion: np.ndarray) -> np.ndarray:
    """[4] (w, x, y, z) -> rotation vector [3] float32 from a hand that points down, half a turn about x."""
    w, x, y, z = quaternion
    # The quaternion times the conjugate of (0, 1, 0, 0).
    w, x, y, z = x, -w, -z, y
    if w < 0:
        w, x, y, z = -w, -x, -y, -z
    sine = float(np.sqrt(x * x + y * y + z * z))
    scale = 2.0 if sine < 1e-8 else 2.0 * np.arctan2(sine, w) / sine
    return (scale * np.array([x, y, z])).astype(np.float32)


def _simulator(name: str, options: ManiSkillOptions) -> Any:
    """The package's environment, which computes no observations of its own."""
    try:
        import gymnasium
        import mani_skill.envs  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        text = "ManiSkill is not installed in this interpreter: examples/scripts/install_maniskill.sh makes one for it"
        raise MissingExtraError(f"{text} (--env_python)") from error
    try:
        return gymnasium.make(
            f"{name}-v1",
            obs_mode="none",
            control_mode="pd_ee_delta_pose",
            num_envs=1,
            sim_backend="physx_cpu",
            render_backend="cpu",
            reward_mode="normalized_dense",
            sensor_configs={"width": options.image_size, "height": options.image_size},
        ).unwrapped
    except RuntimeError as error:
        text = f"ManiSkill cannot be started ({error}): it needs a Vulkan driver, see docs/environments/maniskill.md"
        raise ConfigError.of("task_suite_name", "unavailable", text) from error


def make(task_id: int, **kw: Any) -> ManiSkillEnv:
    """Create the environment of a task; `kw` are the fields of `ManiSkillOptions`."""
    return ManiSkillEnv(task_of(SUITE, list_tasks(**kw), task_id), ManiSkillOptions(**kw))

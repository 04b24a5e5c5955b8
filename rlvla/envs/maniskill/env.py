"""ManiSkill 3 as an rlvla environment: suite `maniskill`, ten tabletop tasks of a Panda arm with a gripper."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, task_of
from rlvla.envs.batched_slots import Advanced, BatchedSlots, SlotEnv
from rlvla.envs.options import SuiteOptions
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import ConfigError, MissingExtraError, Problem

SUITE = "maniskill"
CAMERAS = ("base", "hand")
ACTION_DIM, PROPRIO_DIM = 7, 8
CONTROL_FREQ = 20.0
STEPS = 100
NUM_INIT_STATES = 10_000
LOWEST_REWARD = -1.0
PHYSICS = ("cpu", "gpu")
_ONLY = np.zeros(1, np.int64)  # index of the only episode of a simulator


@dataclass(frozen=True)
class ManiSkillTask:
    """A task.

    Attributes:
        name: the package's name without its version.
        instruction: language instruction (not part of the package).
        events: proposition -> entry of the package's evaluation.
        state_dim: length of the simulation state of its objects and the robot.
        hand_camera: whether its robot carries a camera.
        only_on_cpu: reason why episodes cannot share a simulator; "" if they can.
        highest_reward: maximum reward of a step; the package's normalized reward exceeds 1 in one task.
    """

    name: str
    instruction: str
    state_dim: int
    events: Mapping[str, str] = field(default_factory=dict)
    hand_camera: bool = False
    only_on_cpu: str = ""
    highest_reward: float = 1.0

    @property
    def propositions(self) -> tuple[str, ...]:
        """Propositions of the task, success last."""
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
    ManiSkillTask(
        "RollBall", "roll the ball to the target", 70, only_on_cpu="its reward depends on more than the state"
    ),
    ManiSkillTask(
        "PegInsertionSide",
        "insert the peg into the hole",
        70,
        hand_camera=True,
        only_on_cpu="initial states differ in the shape of the peg",
    ),
    ManiSkillTask("PullCubeTool", "pull the cube closer with the hook", 70, highest_reward=3.0),
)


@dataclass(frozen=True)
class ManiSkillOptions(SuiteOptions):
    """Options of the suite.

    Rendering needs a Vulkan driver, on a CPU Mesa's lavapipe in a version newer than that of Debian 12.

    Attributes:
        object_state: append the simulation state of objects and robot to proprio.
        physics: "cpu" simulates each episode separately; "gpu" simulates all episodes of a worker at once
            (`--envs_per_worker`), with other initial states and without bitwise reproducibility.
    """

    known_cameras: ClassVar[tuple[str, ...]] = CAMERAS
    privileged_options: ClassVar[tuple[str, ...]] = ("object_state",)
    can_play_on: ClassVar[bool] = True

    cameras: tuple[str, ...] = ("base",)
    object_state: bool = arg(False, "append position and orientation of the task's objects to proprio")
    physics: str = arg(
        PHYSICS[0], "cpu: a simulator per episode; gpu: one for all episodes of a task in a worker", choices=PHYSICS
    )


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
            reward_range=(LOWEST_REWARD, task.highest_reward),
            dense_reward=True,
        )
        for task_id, task in enumerate(TASKS)
    ]


def task_problems(tasks: Sequence[TaskSpec], options: Mapping[str, Any]) -> list[Problem]:
    """Problems of options that some of the tasks do not support."""
    facts = [(task.name, TASKS[task.task_id]) for task in tasks]
    problems = []
    bare = [name for name, task in facts if not task.hand_camera]
    if "hand" in options.get("cameras", ()) and bare:
        text = f"--cameras hand: the robot of {', '.join(bare)} carries no camera; take base"
        problems.append(Problem("cameras", "unavailable", text))
    alone = [f"{name} ({task.only_on_cpu})" for name, task in facts if task.only_on_cpu]
    if options.get("physics") == "gpu" and alone:
        text = f"--physics gpu: not for {', '.join(alone)}; take cpu, or leave these out (--task_ids)"
        problems.append(Problem("physics", "unavailable", text))
    return problems


class Scenes:
    """The package's environment for `size` episodes (1 on the CPU).

    It always steps all episodes at once; states and velocities of waiting episodes are restored afterwards, but not the
    contact cache of the GPU solver.
    """

    def __init__(self, facts: ManiSkillTask, size: int, options: ManiSkillOptions):
        self._facts, self._options = facts, options
        self.env: Any = _simulator(facts.name, size, options)
        self._indices = np.arange(size)

    def reset(self, index: int, seed: int) -> None:
        """Sample the initial state of one episode; episodes that are reset together would share a generator."""
        if len(self._indices) == 1:
            self.env.reset(seed=seed)
            return
        import torch

        # As `reset(seed=...)`, which would seed two generators for all episodes each time.
        devices = [self.env.device] if self.env.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            self.env._episode_rng = np.random.RandomState(seed)
            self.env.reset(options={"env_idx": self._tensor(np.array([index]))})

    def step(self, indices: np.ndarray, actions: np.ndarray) -> Advanced:
        """Execute actions [n, D] in the episodes `indices` [n] only."""
        all_actions = np.zeros((len(self._indices), ACTION_DIM), np.float32)
        all_actions[indices] = actions
        waiting = np.setdiff1d(self._indices, indices)
        before = self.env.get_state()[self._tensor(waiting)] if len(waiting) else None
        _, reward, _, _, info = self.env.step(all_actions)
        if before is not None:
            self.env.set_state(before, self._tensor(waiting))
        holds = {name: _numpy(info[entry])[indices] for name, entry in self._facts.events.items()}
        holds["success"] = _numpy(info["success"])[indices].astype(bool)
        events = [frozenset(name for name, true in holds.items() if true[row]) for row in range(len(indices))]
        return Advanced(holds["success"], events, _numpy(reward)[indices])

    def proprio(self, indices: np.ndarray) -> np.ndarray:
        """Proprio [n, P] float32."""
        agent = self.env.agent
        pose = agent.robot.pose.inv() * agent.tcp.pose
        turned = [_turned_from_down(quaternion) for quaternion in _numpy(pose.q)[indices].astype(np.float64)]
        vectors = [_numpy(pose.p)[indices], np.stack(turned), _numpy(agent.robot.get_qpos())[indices, -2:]]
        if self._options.object_state:
            vectors.append(self.state(indices))
        return np.concatenate(vectors, 1).astype(np.float32)

    def state(self, indices: np.ndarray) -> np.ndarray:
        """Simulation state [n, S] float32."""
        return _numpy(self.env.get_state())[indices].astype(np.float32)

    def images(self, indices: np.ndarray) -> np.ndarray:
        """Images [n, N, H, H, 3] uint8."""
        size, env = self._options.image_size, self.env
        if not self._options.cameras:
            return np.empty((len(indices), 0, size, size, 3), np.uint8)
        env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        sensors = [env.scene.sensors[f"{name}_camera"] for name in self._options.cameras]
        for sensor in sensors:
            sensor.capture()
        textures = {"rgb": True, "depth": False, "position": False, "segmentation": False}
        return np.stack([_numpy(sensor.get_obs(**textures)["rgb"])[indices] for sensor in sensors], 1)

    def close(self) -> None:
        """Release the simulator."""
        self.env.close()

    def _tensor(self, indices: np.ndarray) -> Any:
        import torch

        return torch.as_tensor(indices, device=self.env.device)


class ManiSkillBatch(BatchedSlots):
    """One ManiSkill task for `num_slots` episodes: a simulator per episode on the CPU, a single one on a GPU.

    Actions [7] in [-1, 1]: displacement of the hand (1 = 10 cm per axis), rotation (1 = 0.1 rad per axis), and gripper
    (1 opens, -1 closes); 20 Hz.

    Proprio [8]: position between the fingers in meters and rotation vector of the hand (0 if it points down), both in
    the frame of the robot's base, and the positions of both fingers. With `object_state`, followed by the simulation
    state.

    Images show the goal, which the package hides in its own observations; they are rendered once per chunk. The initial
    state id is the package's seed; the draws differ between CPU and GPU.

    Propositions: `grasped` and `placed` if the package's evaluation has them, and `success`.

    Privileged state: `state`, the simulation state.

    Raises:
        ConfigError: an option that the task does not support, no working Vulkan driver, or no GPU for `physics` "gpu".
        MissingExtraError: mani_skill is not installed.
    """

    def __init__(self, spec: TaskSpec, num_slots: int, options: ManiSkillOptions):
        super().__init__(spec, num_slots, options)
        if problems := task_problems([spec], vars(options)):
            raise ConfigError(problems)
        facts = TASKS[spec.task_id]
        size = num_slots if options.physics == "gpu" else 1
        self._size = size
        self._scenes = [Scenes(facts, size, options) for _ in range(num_slots // size)]

    def step_chunk(self, slots: Any, actions: np.ndarray, *, record_frames: bool = False) -> list[ChunkResult]:
        """Execute actions [n, A, D]; see `BatchedEnv.step_chunk`. Raises ValueError for frames without a camera."""
        if record_frames and not self._options.cameras:
            raise ValueError("frames cannot be recorded: the environment was made without cameras")
        return super().step_chunk(slots, actions, record_frames=record_frames)

    def close(self) -> None:
        """Release the simulators. Safe to call twice."""
        if not self._closed:
            for scenes in self._scenes:
                scenes.close()
        super().close()

    def _begin(self, slot: int, init_state_id: int) -> None:
        ((scenes, indices),) = self._locate(np.array([slot]))
        scenes.reset(int(indices[0]), init_state_id)

    def _advance(self, slots: np.ndarray, actions: np.ndarray) -> Advanced:
        located = self._locate(slots)
        done = [scenes.step(indices, rows) for (scenes, indices), rows in zip(located, np.split(actions, len(located)))]
        success, events, rewards = zip(*((one.success, one.events, one.rewards) for one in done))
        return Advanced(np.concatenate(success), [*chain(*events)], np.concatenate(rewards))

    def _observe(self, slots: np.ndarray) -> list[Observation]:
        observations = []
        for scenes, indices in self._locate(slots):
            proprio = scenes.proprio(indices) if self._options.use_proprio else [None] * len(indices)
            pairs = zip(scenes.images(indices), proprio)
            observations += [Observation(images, vector, self.task.instruction) for images, vector in pairs]
        return observations

    def _frames(self, slots: np.ndarray) -> list[np.ndarray]:
        return [images[0] for scenes, indices in self._locate(slots) for images in scenes.images(indices)]

    def _state(self, slot: int) -> dict[str, np.ndarray]:
        ((scenes, indices),) = self._locate(np.array([slot]))
        return {"state": scenes.state(indices)[0]}

    def _locate(self, slots: np.ndarray) -> list[tuple[Scenes, np.ndarray]]:
        """Simulators and episode indices of the slots, in order."""
        return [(self._scenes[0], slots)] if self._size > 1 else [(self._scenes[slot], _ONLY) for slot in slots]


def _turned_from_down(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector [3] float32 of a quaternion [4] (w first) relative to pointing down, a half turn about x."""
    w, x, y, z = quaternion
    # Multiply by the conjugate of (0, 1, 0, 0).
    w, x, y, z = x, -w, -z, y
    if w < 0:
        w, x, y, z = -w, -x, -y, -z
    sine = float(np.sqrt(x * x + y * y + z * z))
    scale = 2.0 if sine < 1e-8 else 2.0 * np.arctan2(sine, w) / sine
    return (scale * np.array([x, y, z])).astype(np.float32)


def _numpy(values: Any) -> np.ndarray:
    return values.cpu().numpy()


def _simulator(name: str, size: int, options: ManiSkillOptions) -> Any:
    """Create the package's environment, without its own observations."""
    try:
        import gymnasium
        import mani_skill.envs  # type: ignore[import-not-found]  # noqa: F401
        import torch
    except ImportError as error:
        text = "ManiSkill is not installed in this interpreter; create one for --env_python with"
        raise MissingExtraError(f"{text} examples/scripts/install_maniskill.sh") from error
    on_gpu = options.physics == "gpu"
    if on_gpu and not torch.cuda.is_available():
        text = "--physics gpu: the workers have no CUDA device; take --physics cpu, which draws other initial states"
        raise ConfigError.of("physics", "unavailable", text)
    try:
        return gymnasium.make(
            f"{name}-v1",
            obs_mode="none",
            control_mode="pd_ee_delta_pose",
            num_envs=size,
            sim_backend="physx_cuda" if on_gpu else "physx_cpu",
            render_backend="gpu" if on_gpu else "cpu",
            reward_mode="normalized_dense",
            sensor_configs={"width": options.image_size, "height": options.image_size},
        ).unwrapped
    except RuntimeError as error:
        needs = "memory on the GPU and its Vulkan driver" if on_gpu else "a Vulkan driver"
        text = f"ManiSkill cannot be started ({error}): it needs {needs}, see docs/environments/maniskill.md"
        raise ConfigError.of("task_suite_name", "unavailable", text) from error


def make(task_id: int, **kw: Any) -> SlotEnv:
    """Create the environment of a task; `kw` are the fields of `ManiSkillOptions`."""
    return SlotEnv(make_batched(task_id, 1, **kw), 0)


def make_batched(task_id: int, num_slots: int, **kw: Any) -> ManiSkillBatch:
    """Create the environment of a task for `num_slots` episodes; `kw` are the fields of `ManiSkillOptions`."""
    return ManiSkillBatch(task_of(SUITE, list_tasks(**kw), task_id), num_slots, ManiSkillOptions(**kw))

"""Tasks of every suite as Gymnasium environments, for other libraries: `gym_env`, `gym_vector_env`, `rlvla/SUITE-v0`.

Importing this module registers the built-in suites with Gymnasium.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_init_state_id, task_of
from rlvla.envs.registry import GYM, get_suite, list_tasks, make_env, suite_names, trust_suite
from rlvla.envs.splits import train_init_states
from rlvla.envs.workers.messages import EnvSpec, PrivilegedState, Reset, StepChunk
from rlvla.envs.workers.pool import EnvPool
from rlvla.utils.errors import ConfigError

SPLITS = ("train", "heldout")
INSTRUCTION, PROPRIO = "instruction", "proprio"  # keys of observations beside the names of the cameras
State = Mapping[str, np.ndarray]  # of the simulator, see `Env.privileged_state`


def gym_env(suite: str, task: int | str = 0, **kw: Any) -> GymEnv:
    """A task as a `gymnasium.Env`; arguments as of `GymEnv`."""
    return GymEnv(suite, task, **kw)


def gym_vector_env(suite: str, task: int | str = 0, num_envs: int = 2, **kw: Any) -> GymVectorEnv:
    """Episodes of a task in worker processes as a `gymnasium.vector.VectorEnv`; arguments as of `GymVectorEnv`."""
    return GymVectorEnv(suite, task, num_envs, **kw)


class _Converter:
    """Spaces of a task, and the conversion of its observations, actions and results.

    Args:
        suite, task, init_states, chunk, options: as `GymEnv`.
    """

    def __init__(
        self, suite: str, task: int | str, init_states: str | Sequence[int], chunk: int, options: Mapping[str, Any]
    ):
        trust_suite(suite)
        tasks = list_tasks(suite, **options)
        ids = {one.name: one.task_id for one in tasks}
        self.task = task_of(suite, tasks, ids.get(task, task))  # type: ignore[arg-type]  # unknown names are reported
        if chunk < 1 or (chunk > 1 and self.task.macro_steps):
            valid = "1: an action is a primitive" if self.task.macro_steps else "at least 1"
            raise ConfigError(f"chunk must be {valid}, not {chunk}")
        self.cameras = tuple(options.get("cameras") or get_suite(suite).default_cameras)
        self.init_states = _init_states(self.task, init_states)
        shape = (self.task.action_dim,) if chunk == 1 else (chunk, self.task.action_dim)
        limit = self.task.action_limit
        self.action_space = spaces.Box(-limit, limit, shape, np.float32)

    def observation_space(self, example: Observation, state: State | None) -> spaces.Dict:
        """The space of observations like this one."""
        space: dict[str, spaces.Space] = {
            name: spaces.Box(0, 255, image.shape, np.uint8)
            for name, image in zip(self.cameras, example.images, strict=True)
        }
        if example.proprio is not None:
            space[PROPRIO] = spaces.Box(-np.inf, np.inf, example.proprio.shape, np.float32)
        if self.task.instructions:
            space[INSTRUCTION] = spaces.Discrete(len(self.task.instructions))
        for name, value in (state or {}).items():
            space[f"state/{name}"] = spaces.Box(-np.inf, np.inf, np.shape(value), np.float32)
        return spaces.Dict(space)

    def observation(self, observation: Observation, state: State | None) -> dict[str, Any]:
        """The observation as an element of `observation_space`."""
        result: dict[str, Any] = dict(zip(self.cameras, observation.images, strict=True))
        if observation.proprio is not None:
            result[PROPRIO] = observation.proprio
        if self.task.instructions:
            result[INSTRUCTION] = np.int64(self.task.instructions.index(observation.instruction))
        return result | {f"state/{name}": np.asarray(value, np.float32) for name, value in (state or {}).items()}

    def sample_init_state(self, rng: np.random.Generator, options: Mapping[str, Any] | None) -> tuple[int, int]:
        """Sample the initial state and the seed of an episode.

        Raises:
            ValueError: the options name an unknown key or initial state.
        """
        options = dict(options or {})
        state = int(options.pop("init_state_id", self.init_states[int(rng.integers(len(self.init_states)))]))
        if options:
            raise ValueError(f"options of reset: init_state_id, not {', '.join(options)}")
        check_init_state_id(self.task, state)
        return state, int(rng.integers(2**31))

    def actions(self, action: np.ndarray) -> np.ndarray:
        """A chunk of actions [A, D]."""
        chunk = np.asarray(action, np.float32).reshape(-1, self.task.action_dim)
        return np.concatenate(
            [chunk, np.zeros((max(0, self.task.macro_steps - len(chunk)), chunk.shape[1]), np.float32)]
        )

    def info(self, observation: Observation, init_state_id: int, result: ChunkResult | None = None) -> dict[str, Any]:
        """Entries of `info` after a reset, or after a step."""
        info: dict[str, Any] = {INSTRUCTION: observation.instruction, "init_state_id": init_state_id}
        if result is not None:
            events = frozenset[str]().union(*result.events)
            info |= {"is_success": bool(result.success_at_end), "steps": result.steps_executed}
            info |= {f"event/{name}": name in events for name in self.task.propositions}
        return info


class GymEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """A task as a Gymnasium environment.

    Observations are a dict: an image [H, W, 3] uint8 per camera, `proprio` [P] float32 if requested, `instruction`, an
    index, if the instruction depends on the initial state, and `state/NAME` float32 with `use_state`. Rewards are the
    simulator's. `info` has the text of the instruction, the initial state, `is_success`, the executed `steps`, and the
    propositions that held.

    Args:
        suite: name of the suite.
        task: id or name of the task.
        init_states: "train" or "heldout", as in the commands, or state ids; `reset` draws one of them, unless its
            options have an `init_state_id`.
        chunk: actions per step, [chunk, D]; 1: [D].
        use_state: observe the state of the simulator, too (`Env.privileged_state`).
        render_mode: "rgb_array" or None.
        options: as `make_env`.

    Raises:
        ConfigError, MissingExtraError: as `make_env`.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        suite: str,
        task: int | str = 0,
        *,
        init_states: str | Sequence[int] = "train",
        chunk: int = 1,
        use_state: bool = False,
        render_mode: str | None = None,
        **options: Any,
    ):
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"render_mode must be 'rgb_array' or None, not {render_mode!r}")
        self._converter = _Converter(suite, task, init_states, chunk, options)
        self.task, self.action_space = self._converter.task, self._converter.action_space
        self.render_mode = render_mode
        self.metadata = {**self.metadata, "render_fps": self.task.control_freq}
        self._env = make_env(suite, self.task.task_id, **options)
        self._use_state = use_state
        self._init_state_id = self._converter.init_states[0]
        self._observation = self._env.reset(self._init_state_id, 0)
        self.observation_space = self._converter.observation_space(self._observation, self._state())

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; `options` may give its `init_state_id`."""
        super().reset(seed=seed)
        self._init_state_id, episode_seed = self._converter.sample_init_state(self.np_random, options)
        self._observation = self._env.reset(self._init_state_id, episode_seed)
        info = self._converter.info(self._observation, self._init_state_id)
        return self._converter.observation(self._observation, self._state()), info

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute an action, or a chunk of them."""
        result = self._env.step_chunk(self._converter.actions(action))
        self._observation = result.observation
        info = self._converter.info(self._observation, self._init_state_id, result)
        observation = self._converter.observation(self._observation, self._state())
        return observation, float(result.rewards.sum()), result.terminated, result.truncated, info

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        """The image of the first camera, upright."""
        if self.render_mode is None:
            return None
        image = self._observation.images[0]
        return image[::-1].copy() if self.task.images_flipped_vertically else image

    def close(self) -> None:
        """Release the simulator."""
        self._env.close()

    def _state(self) -> State | None:
        return self._env.privileged_state() if self._use_state else None


class GymVectorEnv(VectorEnv):
    """A task as a Gymnasium vector environment in worker processes, with autoreset at the next step.

    Args:
        suite, task, init_states, chunk, use_state, options: as `GymEnv`.
        num_envs: number of environments.
        envs_per_worker: environments per worker process.
        custom_modules: files or modules that register the suite, for the workers.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        suite: str,
        task: int | str = 0,
        num_envs: int = 2,
        *,
        init_states: str | Sequence[int] = "train",
        chunk: int = 1,
        use_state: bool = False,
        envs_per_worker: int = 1,
        custom_modules: Sequence[str] = (),
        **options: Any,
    ):
        self._converter = _Converter(suite, task, init_states, chunk, options)
        self.task, self.num_envs = self._converter.task, num_envs
        self._spec = EnvSpec(suite, self.task.task_id, options)
        self._pool = EnvPool(num_envs, envs_per_worker=envs_per_worker, custom_modules=custom_modules)
        self._init_state_ids = [self._converter.init_states[0]] * num_envs
        self._ended, self._use_state = np.zeros(num_envs, bool), use_state
        try:
            (example,) = self._run({0: Reset(self._spec, self._init_state_ids[0], 0)}).values()
            state = self._states([0])[0]
        except BaseException:
            self._pool.close()
            raise
        self.single_action_space = self._converter.action_space
        self.single_observation_space = self._converter.observation_space(example, state)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._observations: list[dict[str, Any]] = [{}] * num_envs
        self._rngs = [np.random.default_rng() for _ in range(num_envs)]

    def reset(  # type: ignore[override]
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start all episodes; environment i draws its states with `seed` + i."""
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        for i, own in enumerate(seeds):
            if own is not None:
                self._rngs[i] = gymnasium.utils.seeding.np_random(own)[0]
        answers = self._run({i: self._reset_command(i, options) for i in range(self.num_envs)})
        states, infos = self._states(answers), dict[str, Any]()
        self._ended[:] = False
        for i, observation in answers.items():
            infos = self._record(infos, i, observation, states[i])
        return self._batch(), infos

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Execute an action in each environment, or start a new episode where the last step ended one."""
        answers = self._run(
            {
                i: self._reset_command(i, None) if self._ended[i] else StepChunk(self._converter.actions(actions[i]))
                for i in range(self.num_envs)
            }
        )
        states, infos = self._states(answers), dict[str, Any]()
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for i, answer in answers.items():
            if isinstance(answer, ChunkResult):
                rewards[i], terminated[i], truncated[i] = answer.rewards.sum(), answer.terminated, answer.truncated
                infos = self._record(infos, i, answer.observation, states[i], answer)
            else:
                infos = self._record(infos, i, answer, states[i])
        self._ended = terminated | truncated
        return self._batch(), rewards, terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers."""
        self._pool.close()

    def _reset_command(self, i: int, options: dict[str, Any] | None) -> Reset:
        self._init_state_ids[i], seed = self._converter.sample_init_state(self._rngs[i], options)
        return Reset(self._spec, self._init_state_ids[i], seed)

    def _record(
        self,
        infos: dict[str, Any],
        i: int,
        observation: Observation,
        state: State | None,
        result: ChunkResult | None = None,
    ) -> dict[str, Any]:
        """Store the observation of an episode; returns `infos` with its entries."""
        self._observations[i] = self._converter.observation(observation, state)
        return self._add_info(infos, self._converter.info(observation, self._init_state_ids[i], result), i)

    def _batch(self) -> dict[str, Any]:
        """The batched observation, a copy."""
        return {name: np.stack([one[name] for one in self._observations]) for name in self._observations[0]}

    def _states(self, slots: Iterable[int]) -> dict[int, State | None]:
        """The states of the simulators after a command, None for each if they are not observed."""
        if not self._use_state:
            return dict.fromkeys(slots)
        return self._run({slot: PrivilegedState() for slot in slots})

    def _run(self, commands: Mapping[int, Reset | StepChunk | PrivilegedState]) -> dict[int, Any]:
        """Execute commands, and return the answer of each slot.

        Raises:
            EnvWorkerError, ConfigError: the first failure, after which only `close` is of use.
        """
        self._pool.submit_all(list(commands.items()))
        answers: dict[int, Any] = {}
        while len(answers) < len(commands):
            answers.update((slot, answer) for slot, answer in self._pool.wait() if slot in commands)
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return dict(sorted(answers.items()))


def _init_states(task: TaskSpec, init_states: str | Sequence[int]) -> Sequence[int]:
    if isinstance(init_states, str):
        if init_states not in SPLITS:
            raise ConfigError(f"init_states must be state ids or one of {', '.join(SPLITS)}, not {init_states!r}")
        training = train_init_states(task)
        return training if init_states == "train" else range(training.stop, task.num_init_states)
    outside = [i for i in init_states if not 0 <= i < task.num_init_states]
    if outside or not len(init_states):
        problem = f"{outside[0]} is none of {task.name}, which has {task.num_init_states}" if outside else "none given"
        raise ConfigError.of("init_states", "out_of_range", f"init_states: {problem}")
    return init_states


for _suite in suite_names():
    if not _suite.startswith(GYM):
        gymnasium.register(f"rlvla/{_suite}-v0", entry_point=f"{__name__}:GymEnv", kwargs={"suite": _suite})

"""Checks and construction shared by training and evaluation: checkpoint, environment, workers.

Everything that can be wrong with a configuration is found here, before a model is loaded or an episode played.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlvla.envs.base import Observation, TaskSpec
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.messages import EnvSpec, Reset
from rlvla.envs.registry import get_suite
from rlvla.envs.watchdog import WatchedPool
from rlvla.envs.worker_config import WorkerConfig, start_pool
from rlvla.models.inspection import head_warnings
from rlvla.models.vla.checkpoint import check_weights, read_config, read_statistics, resolve_statistics_key
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.processing_openvla import load_tokenizer
from rlvla.rewards import RewardConfig, StateInput
from rlvla.trainer.machine_state import state_input_of
from rlvla.trainer.model_checks import checkpoint_overrides, statistics_problems
from rlvla.trainer.policy_config import PolicyConfig
from rlvla.trainer.policy_export import learned_states, recorded_environment
from rlvla.utils.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A checked configuration.

    Attributes:
        env: completed by what the checkpoint recorded.
        tasks: the chosen tasks.
        config: the model's.
        unnorm_key: resolved statistics key.
        overrides: settings that replace those of the checkpoint's config.json.
        state_input: tells the policy the state of a reward machine; None: nothing is told.
    """

    env: EnvConfig
    tasks: list[TaskSpec]
    config: OpenVLAConfig
    unnorm_key: str
    overrides: dict[str, object]
    state_input: StateInput | None = None


def check_setting(
    policy: PolicyConfig,
    env: EnvConfig,
    split: SplitConfig,
    eval_episodes: int,
    rewards: RewardConfig | None = None,
) -> tuple[Setting | None, list[str]]:
    """Check checkpoint folder, environment and split against each other; returns the setting, or all problems.

    `rewards` are those of a training run; an evaluation has none and takes what the checkpoint recorded.
    """
    problems: list[str] = []
    folder, recorded = Path(policy.pretrain), {}
    try:
        recorded = recorded_environment(folder)
    except ConfigError as error:
        problems += error.problems
    env = env.completed(recorded)
    tasks: list[TaskSpec] = []
    config, key, overrides = None, "", {}
    try:
        overrides = checkpoint_overrides(folder, policy)
        config, key = check_checkpoint(folder, policy.unnorm_key, env.task_suite_name, overrides)
    except ConfigError as error:
        problems += error.problems
    problems += head_warnings(folder)
    if config is not None and env.use_proprio is None:  # a foreign checkpoint: its tensors tell
        env = replace(env, use_proprio=config.use_proprio)
    try:
        # A checkpoint that is not there cannot tell the suite: one problem, not two.
        if env.task_suite_name is not None or config is not None:
            tasks = env.tasks()
            problems += split.problems(tasks, eval_episodes, learned_states(recorded) or ())
    except ConfigError as error:
        problems += error.problems
    if config is not None and tasks:
        problems += _contradictions(policy, env, config, tasks)
    state_input = None
    if config is not None and tasks:
        state_input, more = state_input_of(recorded, rewards, config, tasks)
        told = state_input is not None and bool(state_input.settings.width)  # then it has checked the length itself
        problems += more if more or told else _proprio_problems(env, config, tasks)
    if problems or config is None:
        return None, problems
    return Setting(env, tasks, config, key, overrides, state_input), []


def check_checkpoint(
    folder: Path, unnorm_key: str | None, suite: str | None = None, overrides: dict[str, object] | None = None
) -> tuple[OpenVLAConfig, str]:
    """Look at every file of a checkpoint folder without loading its weights.

    Args:
        folder: the checkpoint.
        unnorm_key: statistics key asked for.
        suite: stands in for it where there are several.
        overrides: settings that replace those of its config.json.

    Returns:
        The model's configuration and the resolved statistics key.

    Raises:
        ConfigError: every missing, unreadable or foreign file, and a key that is not there.
    """
    raw = read_config(folder)  # without it nothing else can be judged
    problems, config, key = [], None, ""
    try:
        config = check_weights(OpenVLAForActionPrediction, folder, raw, overrides)
    except ConfigError as error:
        problems += error.problems
    try:
        load_tokenizer(folder)
    except ConfigError as error:
        problems += error.problems
    try:
        statistics = read_statistics(folder, raw)
        key = resolve_statistics_key(statistics, unnorm_key or (suite if len(statistics) > 1 else None))
        if config is not None:
            problems += [f"{folder}: {problem}" for problem in statistics_problems(config, statistics[key])]
    except ConfigError as error:
        problems += [f"{folder}: {problem}" for problem in error.problems]
    if problems or config is None:
        raise ConfigError(problems)
    return config, key


def _contradictions(
    policy: PolicyConfig, env: EnvConfig, config: OpenVLAConfig, tasks: Sequence[TaskSpec]
) -> list[str]:
    found = []
    cameras = len(env.camera_names)
    wanted_images = config.num_images_in_input or policy.num_images_in_input or cameras
    if policy.action_chunk_len not in (None, config.action_chunk_len):
        found.append(f"--action_chunk_len {policy.action_chunk_len}: the checkpoint predicts {config.action_chunk_len}")
    if policy.num_images_in_input not in (None, wanted_images):
        found.append(f"--num_images_in_input {policy.num_images_in_input}: the checkpoint takes {wanted_images}")
    if cameras != wanted_images:
        found.append(f"--cameras {' '.join(env.camera_names)}: the checkpoint takes {wanted_images} image(s)")
    if bool(config.use_proprio) != bool(env.use_proprio):
        takes = "takes" if config.use_proprio else "does not take"
        found.append(f"--use_proprio: the checkpoint {takes} proprioception; leave the flag out or agree with it")
    size = env.image_size or get_suite(env.suite).image_size
    cropped = config.center_crop if policy.center_crop is None else policy.center_crop
    if config.image_preprocessing == "none" and not cropped and size != config.image_size:
        found.append(f"--image_size {size}: the checkpoint takes {config.image_size} pixels")
    dims = {task.action_dim for task in tasks}
    if dims != {config.action_dim}:
        found.append(
            f"suite {env.suite} has {sorted(dims)} action dimensions; the checkpoint predicts {config.action_dim}"
        )
    return found


def _proprio_problems(env: EnvConfig, config: OpenVLAConfig, tasks: Sequence[TaskSpec]) -> list[str]:
    """A projector for another number of values than the tasks have."""
    if not config.use_proprio or not env.use_proprio:
        return []
    other = sorted({task.proprio_dim for task in tasks} - {config.proprio_dim})
    return [
        f"suite {env.suite} has {length} numbers of proprioception; the checkpoint takes {config.proprio_dim}"
        for length in other
    ]


def start_workers(
    num_envs: int,
    env: EnvConfig,
    task: TaskSpec,
    custom_modules: Sequence[str] = (),
    config: WorkerConfig | None = None,
) -> WatchedPool:
    """Start the worker processes and build a task's environment in each of them.

    Raises:
        ConfigError: the environment cannot be built here (no working GL, extra not installed).
    """
    first = EnvSpec(task.suite, task.task_id, env.env_kwargs())
    try:
        return start_pool(num_envs, config or WorkerConfig(), first, custom_modules, env.env_python)
    except ConfigError as error:
        raise ConfigError(error.problems, one_rank=True) from None


def first_observations(pool: WatchedPool, setting: Setting) -> list[Observation]:
    """What the first task shows at the start of an episode, one observation per worker.

    Raises:
        EnvWorkerError, ConfigError: what a worker reported.
    """
    task = setting.tasks[0]
    spec = EnvSpec(task.suite, task.task_id, setting.env.env_kwargs())
    for worker in range(pool.num_workers):
        pool.submit(worker, Reset(spec, worker % task.num_init_states, worker))
    found: list[Observation] = []
    while len(found) < pool.num_workers:
        for _, result in pool.wait():
            if isinstance(result, Exception):
                raise result
            found.append(result)
    if setting.state_input is None:
        return found
    start = setting.state_input.begin(task)
    return [start.told(observation) for observation in found]

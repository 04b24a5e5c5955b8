"""Plays the scripted expert on worker processes and records what it does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rlvla.envs.base import TaskSpec
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.experts import ExpertConfig
from rlvla.envs.messages import EnvSpec, RunExpert
from rlvla.envs.pool import EnvWorkerError
from rlvla.envs.watchdog import WatchedPool
from rlvla.envs.worker_config import WorkerConfig
from rlvla.trainer.demonstrations import DemonstrationWriter
from rlvla.trainer.expert_episodes import expert_episodes
from rlvla.trainer.setup import start_workers
from rlvla.utils.errors import ConfigError
from rlvla.utils.logging import duration, progress_bar, table
from rlvla.utils.seeding import derive_rng, derive_seed

# robosuite and LIBERO put the gripper into the last of 7 dimensions; it is commanded as it is, not normalised.
_GRIPPER_DIMS = {"robosuite": (6,)}
# Episodes lost to failing environments after which there is no point in going on.
MAX_FAILED_EPISODES = 20


class CollectSettings(Protocol):
    """What the recording needs to know; see `cli/collect_demos.py`."""

    output: str
    num_demos: int
    keep: str
    max_attempts: int
    num_envs: int
    seed: int


def collect_demonstrations(
    env: EnvConfig,
    config: CollectSettings,
    split: SplitConfig,
    expert: ExpertConfig,
    workers: WorkerConfig | None = None,
    custom_modules: Sequence[str] = (),
) -> Path:
    """Record `num_demos` episodes of each task and return the HDF5 file.

    Episodes are kept in the order of their initial states, so that the file does not depend on `num_envs`.

    Raises:
        ConfigError: the expert did not succeed often enough within `max_attempts`.
    """
    start = time.perf_counter()
    path = Path(config.output) / "demos.hdf5"
    record = env.as_dict() | {
        "cameras": list(env.camera_names),
        "task_suite_name": env.suite,
        "task_ids": [task.task_id for task in env.tasks()],
    }
    rows = []
    with start_workers(config.num_envs, env, env.tasks()[0], custom_modules, workers) as pool:
        writer = DemonstrationWriter(path, record, env.camera_names, _GRIPPER_DIMS.get(env.suite, ()))
        try:
            for task in env.tasks():
                rows.append(_record_task(pool, env, task, split.train_states(task), config, expert, writer))
            writer.close()
        except BaseException:
            writer.abort()
            raise
    print(table(("task", "kept", "played", "expert success", "mean steps"), rows))
    print(f"{path} ({duration(time.perf_counter() - start)})")
    return path


def _record_task(
    pool: WatchedPool,
    env: EnvConfig,
    task: TaskSpec,
    states: range,
    config: CollectSettings,
    expert: ExpertConfig,
    writer: DemonstrationWriter,
) -> tuple[str, int, int, str, str]:
    order = derive_rng(config.seed, "demos", task.task_id).permutation(len(states))
    spec = EnvSpec(task.suite, task.task_id, env.env_kwargs())
    played = kept = successes = steps = failed = 0
    commands = (
        RunExpert(
            spec,
            states[int(order[attempt % len(states)])],
            derive_seed(config.seed, "expert", task.task_id, attempt),
            expert,
        )
        for attempt in range(config.num_demos * config.max_attempts)
    )
    episodes = expert_episodes(pool, commands)
    with progress_bar(config.num_demos, f"demonstrations of {task.name}") as bar:
        while kept < config.num_demos:
            episode = next(episodes, None)
            if episode is None or failed > MAX_FAILED_EPISODES:
                broken = f" ({failed} more were lost because the environment failed)" if failed else ""
                raise ConfigError(
                    f"the expert succeeded in {successes} of {played} episodes of {task.name}{broken}, too few for "
                    f"{config.num_demos} demonstrations; lower its errors or give --keep all"
                )
            if isinstance(episode, EnvWorkerError):
                failed += 1
                continue
            played += 1
            successes += episode["success_at_end"]
            if config.keep == "all" or episode["success_at_end"]:
                writer.add(episode, task.task_id)
                kept += 1
                steps += len(episode["actions"])
                bar.set_postfix_str(f"expert success {successes / played:.2f}", refresh=False)
                bar.update(1)
    pool.settle()  # for the next task; after an error or an interrupt the pool is closed as it is
    return task.name, kept, played, f"{successes / played:.2f}", f"{steps / kept:.1f}"

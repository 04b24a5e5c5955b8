"""Flags of environment workers: backend, time limits and memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlvla.envs.registry import registered_suites
from rlvla.envs.workers.backend import UNLIMITED
from rlvla.envs.workers.messages import EnvSpec, Make
from rlvla.envs.workers.pool import EnvPool
from rlvla.envs.workers.ray_backend import FRAMES, RayBackend, ray_problems
from rlvla.envs.workers.watchdog import WatchdogLimits, WatchedPool, run_everywhere
from rlvla.utils.budgets import gib, memory_bytes
from rlvla.utils.cli.flags import arg
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.terminal import log, passing_note

_ENV_MEMORY = 0.75  # share of the memory for environments; the rest is for the policy
_WORKER_MB = 300  # of a worker without environments, in which the simulator is imported
_LESS_MEMORY = "lower --num_envs, or give --render_quality fast"


@dataclass(frozen=True)
class WorkerConfig:
    """Backend and limits of environment workers. Workers that hang or crash are replaced."""

    env_backend: str = arg(
        "process", "run workers as processes on this machine, or as actors on a Ray cluster", choices=("process", "ray")
    )
    envs_per_worker: int = arg(
        1,
        "environments per worker, stepped one after another, or in a batch if the suite supports it; a failing worker "
        "loses all of its episodes. The number of workers is --num_envs / --envs_per_worker",
        minimum=1,
        maximum=1000,
    )
    ray_address: str | None = arg(
        None,
        "Ray cluster: HOST:PORT of its head, auto (the one this machine belongs to), or local (started for this "
        "command on this machine); for --env_backend ray, and for policies that run there (default: auto)",
        metavar="ADDRESS",
    )
    ray_frames: str | None = arg(
        None,
        "encoding of camera images sent between machines: raw, or png (lossless, costs CPU time); --env_backend ray "
        "only (default: raw)",
        choices=FRAMES,
    )
    env_create_timeout: float = arg(
        300.0, "time limit in seconds for building an environment", minimum=0.1, maximum=100_000
    )
    env_reset_timeout: float = arg(120.0, "time limit in seconds for a reset", minimum=0.1, maximum=100_000)
    env_step_timeout: float = arg(120.0, "time limit in seconds for an action chunk", minimum=0.1, maximum=100_000)
    env_max_rss_gb: float | None = arg(
        None,
        "replace a worker between episodes if its resident memory exceeds this (off by default)",
        minimum=0.1,
        maximum=100_000,
    )

    def problems(self, env_python: str | None, *, policies_on_ray: bool = False) -> list[Problem]:
        """Validate the flags without starting workers.

        Args:
            env_python: the requested interpreter; None: that of this process.
            policies_on_ray: whether policies run on the Ray cluster.
        """
        if self.env_backend == "ray":
            return ray_problems(self.ray_address or "auto", env_python)
        return [
            Problem(name, "needs_flag", f"--{name} {value} is for --env_backend ray; add that, or leave it out")
            for name, value in (("ray_address", self.ray_address), ("ray_frames", self.ray_frames))
            if value is not None and not (policies_on_ray and name == "ray_address")
        ]

    def pool(
        self,
        num_envs: int,
        custom_modules: Sequence[str] = (),
        python: str | None = None,
        max_kept: int = UNLIMITED,
    ) -> WatchedPool:
        """Start the workers in the background; see `EnvPool` for the arguments."""
        if problems := self.problems(python, policies_on_ray=True):  # --ray_address is checked by the command
            raise ConfigError(problems)
        backend = None
        if self.env_backend == "ray":
            backend = RayBackend(self.ray_address or "auto", self.ray_frames or "raw")
        pool = EnvPool(
            num_envs,
            envs_per_worker=self.envs_per_worker,
            backend=backend,
            python=python,
            custom_modules=custom_modules,
            max_kept=max_kept,
            wait=False,
        )
        limits = WatchdogLimits(
            create=self.env_create_timeout,
            reset=self.env_reset_timeout,
            step=self.env_step_timeout,
            max_rss_gb=self.env_max_rss_gb,
        )
        return WatchedPool(pool, limits)


def max_kept(num_envs: int, first: EnvSpec, num_tasks: int) -> int:
    """Limit of the environments that each slot may cache (`Suite.kept`), from their measured memory.

    Logs a warning if the memory is too small for all of them.

    Args:
        num_envs: number of slots of each rank.
        first: an environment whose suite and options are those of all.
        num_tasks: number of tasks that are played.
    """
    suite = registered_suites().get(first.suite)
    mb = suite.env_mb(first.options) if suite is not None else 0
    if suite is None or not mb:
        return UNLIMITED
    wanted, slots, memory = min(suite.kept, num_tasks - 1), num_envs * launched_world_size(), memory_bytes()
    fitting = int((_ENV_MEMORY * memory / slots / 1e6 - _WORKER_MB) / mb)  # in each slot, with the current one
    if fitting > wanted:
        return UNLIMITED
    kept = max(0, fitting - 1)

    def needed(number: int) -> str:
        size = slots * (_WORKER_MB + number * mb) * 1e6
        return f"need about {gib(size)} ({mb} MB each), and this machine has {gib(memory)} of memory"

    if kept < wanted:
        log.warning(
            f"{first.suite}: {slots} slots that each keep the environments of {wanted + 1} tasks {needed(wanted + 1)}. "
            f"They keep {kept + 1}, and build others again at each change of task; {_LESS_MEMORY}"
        )
    if fitting < 1:
        log.warning(f"{first.suite}: {slots} environments {needed(1)}; {_LESS_MEMORY}")
    return kept


def start_pool(
    num_envs: int,
    config: WorkerConfig,
    first: EnvSpec,
    custom_modules: Sequence[str] = (),
    python: str | None = None,
    num_tasks: int = 1,
) -> WatchedPool:
    """Start the workers and build an environment in each of their slots.

    Args:
        num_envs: number of episodes played concurrently.
        config: backend and limits.
        first: environment to build in each slot.
        custom_modules: see `EnvPool`.
        python: interpreter of the workers; None: that of this process.
        num_tasks: number of tasks that are played.

    Raises:
        ConfigError: the environment cannot be built (no working GL, extra not installed).
        EnvWorkerError: an environment raised an exception, or a worker was lost several times.
    """
    kept = UNLIMITED if config.env_backend == "ray" else max_kept(num_envs, first, num_tasks)
    workers = -(-num_envs // config.envs_per_worker)
    with passing_note(f"starting {workers} environment worker(s) for {first.suite}"):
        pool = config.pool(num_envs, custom_modules, python, kept)
        try:
            run_everywhere(pool, lambda _: Make(first))
        except BaseException:
            pool.close()
            raise
    return pool

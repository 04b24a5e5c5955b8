"""Flags of the workers: where they run, how long each phase may take, how much memory they may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlvla.envs.messages import EnvSpec, Make
from rlvla.envs.pool import EnvPool
from rlvla.envs.ray_backend import FRAMES, RayBackend, ray_problems
from rlvla.envs.watchdog import WatchdogLimits, WatchedPool, run_everywhere
from rlvla.utils.arguments import arg
from rlvla.utils.errors import ConfigError
from rlvla.utils.logging import passing_note


@dataclass(frozen=True)
class WorkerConfig:
    """How environment workers are run. A worker that hangs, crashes or is killed is replaced."""

    env_backend: str = arg(
        "process", "workers are processes of this machine, or actors of a Ray cluster", choices=("process", "ray")
    )
    ray_address: str | None = arg(
        None,
        "Ray cluster: HOST:PORT of its head, auto (the one that this machine belongs to), or local (started for this "
        "command, on this machine alone); --env_backend ray only (default: auto)",
        metavar="ADDRESS",
    )
    ray_frames: str | None = arg(
        None,
        "how camera images travel between machines: raw, or as PNG, which costs time and loses nothing; --env_backend "
        "ray only (default: raw)",
        choices=FRAMES,
    )
    env_create_timeout: float = arg(300.0, "seconds in which an environment must be built", above=0)
    env_reset_timeout: float = arg(120.0, "seconds in which a reset must be done", above=0)
    env_step_timeout: float = arg(120.0, "seconds in which an action chunk must be executed", above=0)
    env_max_rss_gb: float | None = arg(
        None,
        "a worker that holds more resident memory than this is replaced between episodes (off by default)",
        above=0,
    )

    @property
    def limits(self) -> WatchdogLimits:
        """What the watchdog enforces."""
        return WatchdogLimits(
            create=self.env_create_timeout,
            reset=self.env_reset_timeout,
            step=self.env_step_timeout,
            max_rss_gb=self.env_max_rss_gb,
        )

    def problems(self, env_python: str | None) -> list[str]:
        """What keeps workers from being started, apart from ranges; nothing is started.

        Args:
            env_python: the interpreter asked for, None for that of this process.
        """
        if self.env_backend == "ray":
            return ray_problems(self.ray_address or "auto", env_python)
        return [
            f"--{name} {value} is for --env_backend ray; add that, or leave it out"
            for name, value in (("ray_address", self.ray_address), ("ray_frames", self.ray_frames))
            if value is not None
        ]

    def pool(self, num_envs: int, custom_modules: Sequence[str] = (), python: str | None = None) -> EnvPool:
        """Start the workers; see `EnvPool` for the arguments and errors."""
        problems = self.problems(python)
        if problems:
            raise ConfigError(problems)
        backend = None
        if self.env_backend == "ray":
            backend = RayBackend(self.ray_address or "auto", self.ray_frames or "raw")
        return EnvPool(num_envs, backend=backend, python=python, custom_modules=custom_modules)


def watched_pool(
    num_envs: int, config: WorkerConfig, custom_modules: Sequence[str] = (), python: str | None = None
) -> WatchedPool:
    """Start the workers; the arguments are those of `start_pool`.

    Raises:
        ConfigError: the interpreter cannot be started, or the Ray cluster not be reached.
        EnvWorkerError: a worker did not start.
    """
    return WatchedPool(config.pool(num_envs, custom_modules, python), config.limits)


def start_pool(
    num_envs: int,
    config: WorkerConfig,
    first: EnvSpec,
    custom_modules: Sequence[str] = (),
    python: str | None = None,
) -> WatchedPool:
    """Start the workers and build an environment in each of them.

    Args:
        num_envs: how many.
        config: how they are run.
        first: the environment.
        custom_modules: see `EnvPool`.
        python: the interpreter to run them with; None: that of this process.

    Raises:
        ConfigError: the environment cannot be built here (no working GL, extra not installed).
        EnvWorkerError: a worker failed otherwise.
    """
    with passing_note(f"starting {num_envs} environment worker(s) for {first.suite}"):
        pool = watched_pool(num_envs, config, custom_modules, python)
        try:
            run_everywhere(pool, Make(first))
        except BaseException:
            pool.close()
            raise
    return pool

"""Demonstrations of a person in a browser, for `cli/teleoperate.py` and `cli/collect_demos.py --intervene page`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rlvla.commands import sockets
from rlvla.commands.demos.record import demonstration_writer, planned_episodes
from rlvla.commands.setup import instruction_source, instructions_of, start_workers
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import EnvConfig, SplitConfig, heldout_problems
from rlvla.envs.workers.config import WorkerConfig
from rlvla.teleoperation.config import TeleoperationConfig
from rlvla.teleoperation.controls import RESERVED, Binding, Controls, read_bindings
from rlvla.teleoperation.pilot import Pilot
from rlvla.teleoperation.session import KeptEpisodes, Session
from rlvla.utils.cli.flags import range_problems
from rlvla.utils.errors import ConfigError, Problem, as_problems, require
from rlvla.utils.files import output_folder_problem
from rlvla.utils.terminal import log, quiet_libraries, show

_MOST_EPISODES = 10**9  # of a task; a state repeats once all have been used


def run_teleoperation(
    env: EnvConfig,
    config: TeleoperationConfig,
    split: SplitConfig,
    workers: WorkerConfig,
    custom_modules: Sequence[str] = (),
) -> Path | None:
    """Let a person play episodes until it finishes or a signal arrives; returns the HDF5 file, None without episodes.

    Kept episodes are written however the command ends, unless the process is killed.

    Raises:
        ConfigError: flags have problems, all of which are raised before anything is started; the port is in use; or
            the environment cannot be built.
        MissingExtraError: websockets is not installed.
    """
    require("websockets.asyncio.server", extra="serve")
    tasks, bindings = check_teleoperation(env, config, split, workers)
    return serve_page(env, tasks, bindings, config, split=split, workers=workers, custom_modules=custom_modules)


def serve_page(
    env: EnvConfig,
    tasks: Sequence[TaskSpec],
    bindings: Sequence[Binding],
    config: TeleoperationConfig,
    *,
    split: SplitConfig,
    workers: WorkerConfig,
    custom_modules: Sequence[str] = (),
    pilot: Pilot | None = None,
    keep_failures: bool = True,
) -> Path | None:
    """Serve the page of a checked configuration; see `run_teleoperation`, and `Session` for the last arguments."""
    from rlvla.teleoperation.server import HOST, TeleoperationServer

    bound = {binding.dim for binding in bindings}
    if idle := [dim for dim in range(tasks[0].action_dim) if dim not in bound]:
        log.warning(f"no key moves the action dimensions {', '.join(map(str, idle))}, which stay at 0 (--keys)")
    quiet_libraries()
    path, player = Path(config.output) / "demos.hdf5", "teleoperation" if pilot is None else "policy"
    with (
        closing(sockets.listen(HOST, config.port, f"--port {config.port}")) as listener,
        start_workers(1, env, tasks, custom_modules, workers) as pool,
    ):
        name = "person" if pilot is None else "corrected policy"
        writer = demonstration_writer(path, env, tasks, name, instruction_source(env))
        planned = {task.task_id: planned_episodes(task, split, config.seed, player, _MOST_EPISODES) for task in tasks}
        session = Session(pool, env.env_kwargs(), tasks, planned, writer, pilot, keep_failures=keep_failures)
        controls = Controls(bindings, tasks[0], config.speed, config.gripper_start)
        server = TeleoperationServer(
            session,
            controls,
            env.camera_names,
            lambda address: show(f"open: {address}"),
            clock=config.clock,
            wanted=config.num_demos,
        )
        try:
            sockets.serve_until_signal(server, listener, lambda: None)
        finally:
            kept = sum(session.kept.values())
            if kept:
                writer.close()
                show(f"saved {path}: {kept} of {session.played} episodes")
                if pilot is not None:
                    show(_summary(session.totals))
            else:
                writer.abort()
                show("no episode was kept, and nothing was written")
    return path if kept else None


def check_teleoperation(
    env: EnvConfig, config: TeleoperationConfig, split: SplitConfig, workers: WorkerConfig
) -> tuple[list[TaskSpec], list[Binding]]:
    """The tasks and the controls; ConfigError with all problems of the flags."""
    problems = [p for part in (env, config, split, workers) for p in range_problems(part)]
    problems += workers.problems(env.env_python)
    if folder := output_folder_problem(config.output):
        problems.append(Problem("output", "folder_in_use", f"--output: {folder}"))
    tasks: list[TaskSpec] = []
    bindings: list[Binding] = []
    try:
        tasks = env.tasks()
        problems += split.problems(tasks, 1) + heldout_problems(split.heldout_tasks, env, tasks)
        problems += instructions_of(env, tasks)[1]
        bindings = checked_bindings(config, tasks)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return tasks, bindings


def checked_bindings(
    config: TeleoperationConfig, tasks: Sequence[TaskSpec], reserved: Sequence[str] = RESERVED
) -> list[Binding]:
    """The controls of these tasks.

    Raises:
        ConfigError: with all problems of `keys`, and of tasks whose actions keys cannot command.
    """
    problems, bindings = _action_problems(tasks), []
    try:
        bindings = read_bindings(config.keys, tasks[0], reserved)
    except ConfigError as error:
        problems += as_problems(error.problems)
    if problems:
        raise ConfigError(problems)
    return bindings


def _summary(totals: KeptEpisodes) -> str:
    share = totals.interventions / totals.steps
    return f"{share:.0%} of the steps of the kept episodes are yours; {totals.unaided} succeeded without you"


def _action_problems(tasks: Sequence[TaskSpec]) -> list[Problem]:
    """Tasks whose actions no key can command, or that need different keys."""
    if named := [task.name for task in tasks if task.primitives]:
        text = f"{', '.join(named)}: keys command actions of the controller, not primitives; leave --action_space out"
        return [Problem("task_suite_name", "primitives", text)]
    if len({(task.action_dim, task.gripper_dims, task.action_limit) for task in tasks}) > 1:
        text = "the tasks have actions of different kinds, which need different keys; choose with --task_ids"
        return [Problem("task_ids", "mismatch", text)]
    return []

"""Whether the environments of a suite work here: each task is built, reset, stepped and looked at.

It happens in a worker process under the watchdog's time limits, as in training, so that a simulator that crashes or
hangs is a line of the report and not the end of the check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.envs.checks import AnswerChecker, BadAnswerError
from rlvla.envs.config import EnvConfig
from rlvla.envs.messages import Command, EnvSpec, Make, Reset, StepChunk
from rlvla.envs.pool import EnvWorkerError, Result
from rlvla.envs.watchdog import WatchedPool
from rlvla.envs.worker_config import WorkerConfig, watched_pool
from rlvla.utils.arguments import arg, range_problems
from rlvla.utils.contact_sheet import contact_sheet
from rlvla.utils.errors import ConfigError
from rlvla.utils.logging import log, table
from rlvla.utils.runs import write_atomic
from rlvla.utils.video import upright

# Actions of the chunk are uniform in +- this: large enough to be seen, too small to throw things about.
_ACTION_SIZE = 0.3


@dataclass(frozen=True)
class CheckConfig:
    """What is tried, and where the pictures go."""

    output: str = arg("runs/check_env.png", "contact sheet of all tasks and cameras, as PNG; replaced", metavar="FILE")
    check_steps: int = arg(8, "small random actions to execute in each task", minimum=1)
    init_state_id: int = arg(0, "initial state to start from", minimum=0)


@dataclass
class TaskCheck:
    """What came of one task.

    Attributes:
        task: which.
        seconds: of each phase that was completed: `make`, `reset`, `first_step`, `step_chunk`.
        start, end: [N, H, W, 3] uint8 after the reset and after the chunk, where it came that far.
        instruction: what the policy would be told; None before the reset.
        problem: what went wrong, in one line; None if nothing did.
    """

    task: TaskSpec
    seconds: dict[str, float] = field(default_factory=dict)
    start: np.ndarray | None = None
    end: np.ndarray | None = None
    instruction: str | None = None
    problem: str | None = None


def check_tasks(
    pool: WatchedPool,
    tasks: Sequence[TaskSpec],
    options: dict[str, Any],
    *,
    init_state_id: int,
    steps: int,
    on_checked: Callable[[TaskCheck], None] | None = None,
) -> list[TaskCheck]:
    """Check the tasks one after the other in worker 0 of a pool.

    Args:
        pool: the worker; one that fails is replaced.
        tasks: which tasks.
        options: keyword arguments of `make_env`.
        init_state_id: where each episode starts.
        steps: actions that are executed, small and random but always the same.
        on_checked: called after each task.
    """
    checks = []
    for task in tasks:
        check = TaskCheck(task)
        try:
            _check(pool, check, options, init_state_id, steps)
        except (EnvWorkerError, ConfigError, BadAnswerError) as error:
            check.problem = _one_line(error)
        checks.append(check)
        if on_checked:
            on_checked(check)
    return checks


def _check(pool: WatchedPool, check: TaskCheck, options: dict[str, Any], init_state_id: int, steps: int) -> None:
    task, checker = check.task, AnswerChecker(check.task, options)
    spec = EnvSpec(task.suite, task.task_id, options)
    if (said := _timed(pool, check, "make", Make(spec))) != task:
        raise BadAnswerError(f"the environment says it is {said}, the suite's list says {task}")
    first = _timed(pool, check, "reset", Reset(spec, init_state_id, seed=0))
    checker.observation(first)
    assert isinstance(first, Observation)
    check.start, check.instruction = first.images, first.instruction
    if first.images.size and first.images.min() == first.images.max():
        raise BadAnswerError(f"nothing can be seen: every pixel is {first.images.min()}; is there a working GL?")
    rng = np.random.default_rng(0)
    actions = rng.uniform(-_ACTION_SIZE, _ACTION_SIZE, (steps, task.action_dim)).astype(np.float32)
    # What is compiled or loaded at the first step is not the time of a step.
    checker.chunk(_timed(pool, check, "first_step", StepChunk(actions[:1])), 1)
    _timed(pool, check, "reset", Reset(spec, init_state_id, seed=0))
    result = _timed(pool, check, "step_chunk", StepChunk(actions))
    checker.chunk(result, steps)
    assert isinstance(result, ChunkResult)
    check.end = result.observation.images
    unknown = {name for happened in result.events for name in happened} - set(task.propositions)
    if unknown and task.propositions:
        raise BadAnswerError(f"events that are not among the task's propositions: {', '.join(sorted(unknown))}")


def _timed(pool: WatchedPool, check: TaskCheck, phase: str, command: Command) -> Result:
    """Let the worker execute a command; raises what it reports."""
    while not pool.idle():  # it is being started anew after a failure
        pool.wait()
    start = time.perf_counter()
    pool.submit(0, command)
    while not (answers := pool.wait()):
        pass
    result = answers[0][1]
    if isinstance(result, Exception):
        raise result
    check.seconds[phase] = time.perf_counter() - start
    return result


def _one_line(error: Exception) -> str:
    """The first line: a worker's traceback follows it."""
    if isinstance(error, ConfigError):
        return "; ".join(error.problems)
    return str(error).splitlines()[0]


def problems_of(env: EnvConfig, config: CheckConfig, workers: WorkerConfig) -> list[str]:
    """Everything that is wrong with the flags, before a process is started."""
    problems = [problem for part in (env, config, workers) for problem in range_problems(part)]
    problems += workers.problems(env.env_python)
    try:
        for task in env.tasks():
            if config.init_state_id >= task.num_init_states:
                last = task.num_init_states - 1
                problems.append(
                    f"--init_state_id {config.init_state_id}: {task.suite} task {task.task_id} ({task.name}) has "
                    f"initial states 0..{last}"
                )
    except ConfigError as error:
        problems += error.problems
    if Path(config.output).suffix.lower() != ".png":
        problems.append(f"--output {config.output}: the contact sheet is a PNG; name a file that ends in .png")
    if Path(config.output).is_dir():
        problems.append(f"--output {config.output} is a folder; name a file")
    return problems


def run_check(
    env: EnvConfig, config: CheckConfig, workers: WorkerConfig, custom_modules: Sequence[str] = ()
) -> list[TaskCheck]:
    """Check every task, or those of `--task_ids`; prints a line for each and writes the contact sheet.

    Raises:
        ConfigError: a mistake in the flags.
        EnvWorkerError: no worker process can be started at all.
    """
    if not env.task_ids and env.task_suite_name is not None:  # all, not only those that training means by default
        try:
            every = tuple(task.task_id for task in env.suite_tasks({}))
            env = replace(env, task_ids=every)
        except ConfigError:
            pass  # reported below
    problems = problems_of(env, config, workers)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    with watched_pool(1, workers, custom_modules, env.env_python) as pool:
        checks = check_tasks(
            pool,
            env.tasks(),
            env.env_kwargs(),
            init_state_id=config.init_state_id,
            steps=config.check_steps,
            on_checked=lambda check: log.info(f"{check.task.name}: {check.problem or 'ok'}"),
        )
    write_atomic(Path(config.output), contact_sheet(_pictures(checks, env.camera_names)))
    print(as_table(checks, config.check_steps))
    return checks


def as_table(checks: Sequence[TaskCheck], steps: int) -> str:
    """A line per task: seconds of building and of a reset, milliseconds per step with one image per chunk."""
    rows = []
    for check in checks:
        made, reset, chunk = (check.seconds.get(phase) for phase in ("make", "reset", "step_chunk"))
        rows.append(
            (
                check.task.task_id,
                check.task.name,
                "-" if made is None else f"{made:.2f}",
                "-" if reset is None else f"{reset:.2f}",
                "-" if chunk is None else f"{1000 * chunk / steps:.1f}",
                "failed" if check.problem else "ok",
                check.instruction or check.task.instruction,
            )
        )
    return table(("id", "task", "build s", "reset s", "ms per step", "result", "instruction"), rows)


def _pictures(checks: Sequence[TaskCheck], cameras: Sequence[str]) -> list[tuple[str, np.ndarray | None]]:
    """What each camera saw last in each task."""
    pictures: list[tuple[str, np.ndarray | None]] = []
    for check in checks:
        seen = check.start if check.end is None else check.end
        for index, camera in enumerate(cameras):
            caption = f"{check.task.task_id} {camera}: {check.problem or check.instruction}"
            pictures.append((caption, None if seen is None else upright(seen[index], check.task.rows_from_below)))
    return pictures

"""Checks that the environments of a suite work on this machine: each task is built, reset, stepped and rendered.

The environments run in a worker process under the watchdog's time limits, as in training, so that a simulator that
crashes or hangs is reported and does not end the check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.envs.config import EnvConfig
from rlvla.envs.workers.answer_checks import AnswerChecker, BadAnswerError
from rlvla.envs.workers.config import WorkerConfig
from rlvla.envs.workers.messages import Command, EnvSpec, Make, Reset, StepChunk
from rlvla.envs.workers.pool import EnvWorkerError, Result
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.utils.cli.flags import arg, range_problems
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import write_atomic
from rlvla.utils.terminal import log, table
from rlvla.utils.video import contact_sheet, upright

NOT_REPEATED = "not deterministic: the same actions from the same initial state led elsewhere"
OTHER_PICTURES = "not deterministic: the same actions from the same initial state gave other pictures"
# Actions are uniform in +- this: large enough to be visible, too small to throw objects around.
_ACTION_SIZE = 0.3


@dataclass(frozen=True)
class CheckConfig:
    """Length of the check and output of its images."""

    output: str = arg(
        "runs/check_env.png",
        "contact sheet of all tasks and cameras, as PNG; overwritten",
        metavar="FILE",
        writes="file",
    )
    check_steps: int = arg(8, "small random actions to execute in each task", minimum=1)
    init_state_id: int = arg(0, "initial state to start from", minimum=0)


@dataclass
class TaskCheck:
    """Result of checking a task.

    Attributes:
        task: the task.
        seconds: duration of each completed phase: `make`, `reset`, `first_step`, `step_chunk`.
        start: [N, H, W, 3] uint8, images after the reset; None if it failed.
        end: [N, H, W, 3] uint8, images after the chunk; None if it failed.
        instruction: the language instruction; None before the reset.
        steps: number of actions executed in the chunk.
        problems: one line each.
        differs: how a repetition of the same actions from the same initial state differs, or None.
    """

    task: TaskSpec
    seconds: dict[str, float] = field(default_factory=dict)
    start: np.ndarray | None = None
    end: np.ndarray | None = None
    instruction: str | None = None
    steps: int = 0
    problems: list[str] = field(default_factory=list)
    differs: str | None = None

    @property
    def problem(self) -> str | None:
        """All problems in one line, or None."""
        return "; ".join(self.problems) or None


def check_tasks(
    pool: WatchedPool,
    tasks: Sequence[TaskSpec],
    options: dict[str, Any],
    *,
    init_state_id: int,
    steps: int,
    on_checked: Callable[[TaskCheck], None] | None = None,
) -> list[TaskCheck]:
    """Check the tasks one by one in worker 0 of a pool.

    Args:
        pool: the worker pool; a worker that fails is replaced.
        tasks: the tasks to check.
        options: keyword arguments of `make_env`.
        init_state_id: initial state of each episode.
        steps: number of small random actions to execute, the same for each task.
        on_checked: called after each task.
    """
    checks = []
    for task in tasks:
        check = TaskCheck(task)
        try:
            _check(pool, check, options, init_state_id, steps)
        except ConfigError as error:
            check.problems += map(str, error.problems)
        except EnvWorkerError as error:
            check.problems.append(str(error).splitlines()[0])  # without the worker's traceback
        checks.append(check)
        if on_checked:
            on_checked(check)
    return checks


def _check(pool: WatchedPool, check: TaskCheck, options: dict[str, Any], init_state_id: int, steps: int) -> None:
    task, checker = check.task, AnswerChecker(check.task, options)
    spec = EnvSpec(task.suite, task.task_id, options)
    _judge(check, "make", checker.made, _timed(pool, check, "make", Make(spec)))
    first = _timed(pool, check, "reset", Reset(spec, init_state_id, seed=0))
    _judge(check, "reset", checker.observation, first)
    if isinstance(first, Observation):
        check.start, check.instruction = _images(first), str(first.instruction)
    if check.start is not None and check.start.min() == check.start.max():
        check.problems.append(f"nothing can be seen: every pixel is {check.start.min()}; is there a working GL?")
    rng = np.random.default_rng(0)
    length = task.macro_steps or steps
    actions = rng.uniform(-_ACTION_SIZE, _ACTION_SIZE, (length, task.action_dim)).astype(np.float32)
    # The first step is timed separately, since it may include compilation or loading.
    first_actions = actions[: task.macro_steps or 1]
    result = _timed(pool, check, "first_step", StepChunk(first_actions))
    _judge(check, "step_chunk", checker.chunk, result, len(first_actions))
    _timed(pool, check, "reset", Reset(spec, init_state_id, seed=0))
    result = _timed(pool, check, "step_chunk", StepChunk(actions))
    _judge(check, "step_chunk", checker.chunk, result, length)
    _timed(pool, check, "reset", Reset(spec, init_state_id, seed=0))
    again = _timed(pool, check, "step_chunk", StepChunk(actions))
    if isinstance(result, ChunkResult):
        if not check.problems and isinstance(again, ChunkResult):
            check.differs = _difference(result, again)
        check.steps = result.steps_executed if isinstance(result.steps_executed, int) else 0
        check.end = _images(result.observation)


def _difference(first: ChunkResult, second: ChunkResult) -> str | None:
    """How two results of the same actions from the same initial state differ; None if they do not."""

    def outcome(result: ChunkResult) -> list[object]:
        arrays = [result.observation.proprio, result.rewards, result.successes]
        ends = (result.steps_executed, result.terminated, result.truncated)
        return [*(None if array is None else array.tobytes() for array in arrays), *ends]

    if outcome(first) != outcome(second):
        return NOT_REPEATED
    same = first.observation.images.tobytes() == second.observation.images.tobytes()
    return None if same else OTHER_PICTURES


def _judge(check: TaskCheck, phase: str, judge: Callable[..., None], *answer: object) -> None:
    """Note violations of the contract in an answer."""
    try:
        judge(*answer)
    except BadAnswerError as error:
        earlier = {problem.partition(": ")[2] for problem in check.problems}
        check.problems += [f"{phase}: {problem}" for problem in error.problems if problem not in earlier]


def _images(observation: object) -> np.ndarray | None:
    """The images of an observation, or None if they cannot be drawn."""
    images = getattr(observation, "images", None)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or not images.size:
        return None
    return images if images.shape[3] == 3 else None


def _timed(pool: WatchedPool, check: TaskCheck, phase: str, command: Command) -> Result:
    """Execute a command in the worker and time it; raises the error that the worker reports."""
    while not pool.idle():  # being restarted after a failure
        pool.wait()
    start = time.perf_counter()
    result: Result = pool.call(0, command)
    check.seconds[phase] = time.perf_counter() - start
    return result


def problems_of(env: EnvConfig, config: CheckConfig, workers: WorkerConfig) -> list[Problem]:
    """All problems of the flags; called before a process is started."""
    problems = [p for part in (env, config, workers) for p in range_problems(part)]
    problems += workers.problems(env.env_python)
    try:
        for task in env.tasks():
            if config.init_state_id >= task.num_init_states:
                text = f"--init_state_id {config.init_state_id}: {task.suite} task {task.task_id} ({task.name})"
                text += f" has initial states 0..{task.num_init_states - 1}"
                problems.append(Problem("init_state_id", "out_of_range", text))
    except ConfigError as error:
        problems += error.problems
    if Path(config.output).suffix.lower() != ".png":
        text = f"--output {config.output}: the contact sheet is a PNG; name a file that ends in .png"
        problems.append(Problem("output", "not_png", text))
    return problems


def run_check(
    env: EnvConfig, config: CheckConfig, workers: WorkerConfig, custom_modules: Sequence[str] = ()
) -> list[TaskCheck]:
    """Check the selected tasks, by default all; prints a line per task and writes the contact sheet.

    Raises:
        ConfigError: there are mistakes in the flags.
        EnvWorkerError: the worker process cannot be started.
    """
    if not (env.task_ids or env.task_names or env.task_suite_name is None):  # all, not only the defaults of training
        try:
            all_tasks = tuple(task.task_id for task in env.suite_tasks({}))
            env = replace(env, task_ids=all_tasks)
        except ConfigError:
            pass  # reported below
    problems = problems_of(env, config, workers)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    with workers.pool(1, custom_modules, env.env_python) as pool:
        checks = check_tasks(
            pool,
            env.tasks(),
            env.env_kwargs(),
            init_state_id=config.init_state_id,
            steps=config.check_steps,
            on_checked=lambda check: log.info(_lines(check)),
        )
    write_atomic(Path(config.output), contact_sheet(_pictures(checks, env.camera_names)))
    print(as_table(checks))
    return checks


def _lines(check: TaskCheck) -> str:
    """The result of a task: a line, or one for each of several problems."""
    if len(check.problems) > 1:
        return "\n  - ".join((f"{check.task.name}:", *check.problems))
    return f"{check.task.name}: {check.problem or '; '.join(filter(None, ('ok', check.differs)))}"


def as_table(checks: Sequence[TaskCheck]) -> str:
    """A table with one line per task: seconds to build and to reset, milliseconds per step of the chunk."""
    rows = []
    for check in checks:
        made, reset, chunk = (check.seconds.get(phase) for phase in ("make", "reset", "step_chunk"))
        rows.append(
            (
                check.task.task_id,
                check.task.name,
                "-" if made is None else f"{made:.2f}",
                "-" if reset is None else f"{reset:.2f}",
                "-" if chunk is None or not check.steps else f"{1000 * chunk / check.steps:.1f}",
                "failed" if check.problem else "ok, not deterministic" if check.differs else "ok",
                check.instruction or check.task.instruction,
            )
        )
    return table(("id", "task", "build s", "reset s", "ms per step", "result", "instruction"), rows)


def _pictures(checks: Sequence[TaskCheck], cameras: Sequence[str]) -> list[tuple[str, np.ndarray | None]]:
    """The last image of each camera in each task."""
    pictures: list[tuple[str, np.ndarray | None]] = []
    for check in checks:
        seen = check.start if check.end is None else check.end
        for index, camera in enumerate(cameras):
            caption = f"{check.task.task_id}, {camera}: {check.problem or check.instruction}"
            shown = None if seen is None or index >= len(seen) else seen[index]
            flipped = check.task.images_flipped_vertically
            pictures.append((caption, None if shown is None else upright(shown, flipped)))
    return pictures

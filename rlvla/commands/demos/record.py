"""Recording episodes of a player, a scripted expert or a trained policy, as demonstrations."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from rlvla.commands.demos.config import CollectConfig
from rlvla.commands.setup import instruction_source, start_workers
from rlvla.data.demonstrations import PLAYER
from rlvla.data.robomimic import DemonstrationWriter
from rlvla.envs.base import Observation, TaskSpec
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.experts import ExpertConfig
from rlvla.envs.experts.episode import ExpertEpisode
from rlvla.envs.workers.answer_checks import AnswerChecker, BadAnswerError
from rlvla.envs.workers.config import WorkerConfig
from rlvla.envs.workers.messages import EnvSpec, PlayActions, RunExpert
from rlvla.envs.workers.pool import EnvWorkerError
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.experience import Sample
from rlvla.rewards.instructions import InstructionSource, PlannerInstructions
from rlvla.utils.bars import progress_bar
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.seeding import derive_rng, derive_seed
from rlvla.utils.terminal import duration, show, table

# Number of episodes per task that may be lost to failing environments before the command gives up.
MAX_FAILED_EPISODES = 20
_SURE = 4.0  # standard deviations by which the expert's success is judged too low, at any number of episodes
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """An episode that was played to its end.

    Attributes:
        success: it ended in success.
        episode: its data; None for an episode without success that is not to be kept.
    """

    success: bool
    episode: ExpertEpisode | None


@dataclass
class Player:
    """Plays the episodes that are recorded.

    Attributes:
        name: the kind of player, for messages.
        advice: remedy if it succeeds too rarely.
        env: the environment in which the episodes are recorded.
        config: number and choice of the episodes.
        split: initial states.
    """

    name: ClassVar[str]
    advice: ClassVar[str]

    env: EnvConfig
    config: CollectConfig
    split: SplitConfig

    def problems(self) -> list[Problem]:
        """Tasks that cannot be played."""
        return []

    def most_attempts(self, task: TaskSpec) -> int:
        """Episodes of a task after which to give up."""
        return self.config.wanted(task) * self.config.max_attempts

    def attempts(self, pool: WatchedPool, task: TaskSpec) -> Iterator[Attempt | EnvWorkerError]:
        """At most that many, in the order in which they were started.

        A caller that stops early and wants to use the pool again must call `pool.drain` first.

        Raises:
            ConfigError: reported by a worker.
        """
        raise NotImplementedError

    def summary(self) -> str:
        """A line about the recorded episodes; "" for none."""
        return ""


@dataclass
class Tally:
    """Episodes of a task so far: played, successful, kept, and lost to failures of the environment."""

    played: int = 0
    successes: int = 0
    kept: int = 0
    failed: int = 0

    @property
    def success(self) -> float:
        """Share of the played episodes that succeed; 0 without any."""
        return self.successes / self.played if self.played else 0.0

    def hopeless(self, wanted: int, attempts: int) -> bool:
        """Whether successful episodes are certainly too rare to record `wanted` of them in `attempts`.

        By the upper bound of Wilson's interval (1927): without a single success this is known after about 300 of 20
        attempts per demonstration.
        """
        if not self.played:
            return False
        n, rate, z2 = self.played, self.success, _SURE**2
        spread = _SURE * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
        most = (rate + z2 / (2 * n) + spread) / (1 + z2 / n)
        return most * (attempts - n - self.failed) < wanted - self.kept

    def why(self, task: str, wanted: int, player: str, advice: str) -> str:
        """Reason why a task cannot be recorded: failures of the environment or of the player."""
        if self.failed > max(MAX_FAILED_EPISODES, self.played) or not self.played:
            return (
                f"the environment of {task} fails (see the warnings above): {self.failed} episodes were lost and "
                f"{self.played} played; check it with cli/check_env.py"
            )
        lost = f" ({self.failed} more were lost because the environment failed)" if self.failed else ""
        return (
            f"the {player} succeeded in {self.successes} of {self.played} episodes of {task}{lost}, too few for "
            f"{wanted} demonstrations; {advice} or give --keep all"
        )


def collect_demonstrations(
    player: Player, workers: WorkerConfig | None = None, custom_modules: Sequence[str] = ()
) -> Path:
    """Record the wanted number of episodes of each task and return the HDF5 file.

    Episodes are kept in the order in which they were started, so that the file does not depend on `num_envs`, unless
    `max_minutes` ends the recording.

    Raises:
        ConfigError: the player did not succeed often enough within its attempts.
    """
    start = time.perf_counter()
    env, config = player.env, player.config
    path, tasks = Path(config.output) / "demos.hdf5", env.tasks()
    with start_workers(config.num_envs, env, tasks, custom_modules, workers) as pool:
        source = instruction_source(env)
        writer = demonstration_writer(path, env, tasks, player.name, source)
        try:
            rows = []
            for left, task in zip(range(len(tasks), 0, -1), tasks):
                limit = math.inf if config.max_minutes is None else 60 * config.max_minutes
                seconds = max(0.0, start + limit - time.perf_counter()) / left
                rows.append(_record_task(pool, task, player, writer, seconds))
            writer.close()
        except BaseException:
            writer.abort()
            raise
    print(table(("task", "kept", "played", f"{player.name} success", "mean steps"), rows))
    if text := player.summary():
        show(text)
    if isinstance(source, PlannerInstructions):
        counts = source.metrics()
        show(f"planner: {counts['instruction/requests']:.0f} questions, {counts['instruction/failures']:.0f} failed")
        source.close()
    show(f"saved {path} after {duration(time.perf_counter() - start)}")
    return path


def demonstration_writer(
    path: Path, env: EnvConfig, tasks: Sequence[TaskSpec], player: str, source: InstructionSource | None = None
) -> DemonstrationWriter:
    """The writer of episodes that a player (`Player.name`) plays of these tasks in an environment.

    `source` gives the instruction of each step, see `instruction_source`.
    """
    record = env.as_dict() | {
        "cameras": list(env.camera_names),
        "task_suite_name": env.suite,
        "task_ids": [task.task_id for task in tasks],
        PLAYER: player,
    }
    by_id = {task.task_id: task for task in tasks}

    def label(episode: ExpertEpisode, task_id: int) -> list[str] | None:
        return None if source is None else step_instructions(source, by_id[task_id], episode)

    return DemonstrationWriter(path, record, env.camera_names, tasks[0].gripper_dims, label=label)


def step_instructions(source: InstructionSource, task: TaskSpec, episode: ExpertEpisode) -> list[str]:
    """The instruction of each step of an episode, as if each were a decision."""
    instructions, texts = source.begin(task, wait=True), []
    for step, success in enumerate(episode["successes"]):
        proprio = None if episode["proprio"] is None else episode["proprio"][step]
        texts.append(instructions.decide(Observation(episode["images"][step], proprio, episode["instruction"])))
        instructions.step(frozenset(episode["events"][step] if episode["events"] else ()), bool(success))
    return texts


def _record_task(
    pool: WatchedPool, task: TaskSpec, player: Player, writer: DemonstrationWriter, seconds: float
) -> tuple[str, int, int, str, str]:
    """Record a task for at most `seconds`, but at least an episode; its row of the table."""
    end = time.perf_counter() + seconds
    config, wanted, most = player.config, player.config.wanted(task), player.most_attempts(task)
    tally, steps = Tally(), 0
    attempts = player.attempts(pool, task)
    with progress_bar(wanted, f"demonstrations of {task.name}") as bar:
        while tally.kept < wanted and not (tally.kept and time.perf_counter() > end):
            attempt = next(attempts, None)
            hopeless = config.keep == "success" and tally.hopeless(wanted, most)
            if attempt is None or hopeless or tally.failed > MAX_FAILED_EPISODES:
                raise ConfigError(tally.why(task.name, wanted, player.name, player.advice))
            if isinstance(attempt, EnvWorkerError):
                tally.failed += 1
                continue
            tally.played += 1
            tally.successes += attempt.success
            if attempt.episode is not None and (config.keep == "all" or attempt.success):
                writer.add(attempt.episode, task.task_id)
                tally.kept += 1
                steps += len(attempt.episode["actions"])
                bar.set_postfix_str(f"{player.name} success {tally.success:.2f}", refresh=False)
                bar.update(1)
    if tally.kept < wanted:
        log.warning(f"{task.name}: {tally.kept} of {wanted} episodes, as --max_minutes {config.max_minutes:g} is over")
    pool.drain()  # for the next task; after an error or an interrupt the pool is closed as it is
    return task.name, tally.kept, tally.played, f"{tally.success:.2f}", f"{steps / tally.kept:.1f}"


def planned_episodes(
    task: TaskSpec, split: SplitConfig, seed: int, player: str, count: int
) -> Iterator[tuple[int, int]]:
    """Initial state and seed of each of `count` episodes of a task; a state repeats once all have been used."""
    states = split.train_states(task)
    order = derive_rng(seed, "demos", task.task_id).permutation(len(states))
    for attempt in range(count):
        yield states[int(order[attempt % len(states)])], derive_seed(seed, player, task.task_id, attempt)


def complete_episodes(
    pool: WatchedPool, commands: Iterable[RunExpert | PlayActions], checker: AnswerChecker, *, retries: int = 2
) -> Iterator[Attempt | EnvWorkerError]:
    """Play the commands, all of one task, on all workers; yields one result per command, in their order.

    An episode whose environment fails, or whose answer `checker` refuses, is retried up to `retries` times; after that
    its result is the last error. One that was lost with another episode of the same worker is always retried. A caller
    that stops early and wants to use the pool again must call `pool.drain` first.

    Raises:
        ConfigError: reported by a worker.
    """
    source = iter(commands)
    again: deque[tuple[int, RunExpert | PlayActions]] = deque()
    playing: dict[int, tuple[int, RunExpert | PlayActions]] = {}
    finished: dict[int, ExpertEpisode | EnvWorkerError] = {}
    failures: dict[int, int] = {}
    asked = given = 0
    while True:
        for worker in pool.idle():
            job = again.popleft() if again else None
            if job is None and (command := next(source, None)) is not None:
                job, asked = (asked, command), asked + 1
            if job is not None:
                playing[worker] = job
                pool.submit(worker, job[1])
        if not (playing or again or finished):
            return
        for worker, result in pool.wait():
            number, command = playing.pop(worker)
            if isinstance(result, ConfigError):
                raise result
            if not isinstance(result, EnvWorkerError):
                try:
                    checker.expert_episode(result, command.init_state_id, command.seed)
                except BadAnswerError as error:
                    result = pool.reject(worker, error)
            if isinstance(result, EnvWorkerError):
                log.warning("an episode failed: %s", result)
                failures[number] = failures.get(number, 0) + (not result.collateral)
                if result.collateral or failures[number] <= retries:
                    again.append((number, command))
                    continue
            finished[number] = result  # type: ignore[assignment]
        while given in finished:
            given += 1
            episode = finished.pop(given - 1)
            if isinstance(episode, EnvWorkerError):
                yield episode
            else:
                yield Attempt(bool(episode["success_at_end"]), episode)


def replay_actions(
    pool: WatchedPool,
    env: EnvConfig,
    task_id: int,
    max_steps: int,
    samples: Sequence[Sample],
    *,
    takeovers: Sequence[int] | None = None,
    expert: ExpertConfig | None = None,
    retries: int = 2,
) -> Iterator[Attempt | EnvWorkerError]:
    """Replay the actions of episodes of a task in another environment, see `complete_episodes`.

    Args:
        pool: the workers.
        env: the environment of the recording.
        task_id: the task.
        max_steps: step limit of the episodes.
        samples: the episodes.
        takeovers: per episode the step at which `expert` takes over; None: the whole episodes are replayed.
        expert: the expert's errors.
        retries: see `complete_episodes`.
    """
    (task,) = (task for task in env.tasks() if task.task_id == task_id)
    options, limit = env.env_kwargs(), task.action_limit
    if task.max_steps != max_steps:  # several tasks, whose limits differ
        task, options = replace(task, max_steps=max_steps), {**options, "max_steps": max_steps}
    spec = EnvSpec(task.suite, task_id, options)
    commands: list[RunExpert | PlayActions] = []
    for number, sample in enumerate(samples):
        actions = np.clip(sample.played_actions.numpy(), -limit, limit)
        episode = spec, sample.init_state_id, sample.seed
        if takeovers is None:
            commands.append(PlayActions(*episode, actions))
        else:
            commands.append(RunExpert(*episode, expert or ExpertConfig(), actions[: takeovers[number]]))
    return complete_episodes(pool, commands, AnswerChecker(task, options), retries=retries)

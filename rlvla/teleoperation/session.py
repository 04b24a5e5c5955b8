"""The episodes that a person plays: simulator, recording, and the choice of tasks and initial states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from rlvla.data.robomimic import DemonstrationWriter
from rlvla.envs.base import Observation, TaskSpec
from rlvla.envs.experts.episode import EpisodeRecorder
from rlvla.envs.workers.answer_checks import AnswerChecker, BadAnswerError
from rlvla.envs.workers.messages import EnvSpec, Reset, StepChunk
from rlvla.envs.workers.pool import EnvWorkerError
from rlvla.envs.workers.watchdog import WatchedPool


class Phase(StrEnum):
    """State of an episode."""

    STARTING = "starting"
    PLAYING = "playing"
    ENDED = "ended"  # by success, a failure, or a limit
    FAILED = "failed"  # the simulator failed


class Session:
    """Episodes in the first slot of a pool. Methods block, and must not run at the same time.

    Each episode is of the task with the fewest kept ones.

    Args:
        pool: the worker.
        options: keyword arguments of `make_env`.
        tasks: the tasks.
        planned: task id -> initial states and seeds of its episodes.
        writer: receives the kept episodes.

    Attributes:
        task: task of the current episode.
        phase: its state.
        observation: the latest observation; None before the first reset.
        success: whether the latest step was successful.
        message: how the episode ended or failed; "" while it is played.
        kept: number of kept episodes by task id.
        played: number of started episodes.
    """

    def __init__(
        self,
        pool: WatchedPool,
        options: dict[str, Any],
        tasks: Sequence[TaskSpec],
        planned: Mapping[int, Iterator[tuple[int, int]]],
        writer: DemonstrationWriter,
    ):
        self._pool, self._options, self._tasks, self._planned, self._writer = pool, options, tasks, planned, writer
        self._checkers = {task.task_id: AnswerChecker(task, options) for task in tasks}
        self._start = 0, 0  # initial state and seed
        self._recorder: EpisodeRecorder | None = None
        self.task = tasks[0]
        self.phase = Phase.STARTING
        self.observation: Observation | None = None
        self.success = False
        self.message = ""
        self.kept = {task.task_id: 0 for task in tasks}
        self.played = 0

    @property
    def steps(self) -> int:
        """Steps of the current episode."""
        return 0 if self._recorder is None else len(self._recorder)

    def begin(self) -> None:
        """Start the next episode."""
        self.task = min(self._tasks, key=lambda task: self.kept[task.task_id])
        self._start = next(self._planned[self.task.task_id])
        self.restart()

    def restart(self) -> None:
        """Discard the current episode, and start it again."""
        self._recorder, self.phase, self.success, self.message = None, Phase.STARTING, False, ""
        self.played += 1
        command = Reset(EnvSpec(self.task.suite, self.task.task_id, self._options), *self._start)
        observation = self._call(command)
        if observation is not None:
            self.observation, self.phase = observation, Phase.PLAYING
            self._recorder = EpisodeRecorder(observation, *self._start)

    def step(self, action: np.ndarray) -> None:
        """Execute an action [D] of the current episode, which must be playing."""
        assert self._recorder is not None
        result = self._call(StepChunk(action[None]))
        if result is None:
            return
        self._recorder.add(action, result)
        self.observation, self.success = result.observation, bool(result.successes[0])
        if result.terminated or result.truncated:
            self.phase = Phase.ENDED
            reason = "the episode ended in a failure" if result.terminated else "the step limit is reached"
            self.message = "success" if result.success_at_end else f"no success: {reason}"

    def keep(self) -> bool:
        """Write the current episode and start the next; False, and nothing changes, before its first step."""
        if self._recorder is None or not len(self._recorder) or self.phase is Phase.FAILED:
            return False
        self._writer.add(self._recorder.episode(), self.task.task_id)
        self._writer.flush()
        self.kept[self.task.task_id] += 1
        self._recorder = None  # never written twice, even if the next reset fails
        self.begin()
        return True

    def _call(self, command: Reset | StepChunk) -> Any:
        """The checked answer of the simulator; None, with `phase` and `message` set, if it failed."""
        checker = self._checkers[self.task.task_id]
        try:
            answer = self._pool.call(0, command)
            try:
                if isinstance(command, Reset):
                    checker.observation(answer)
                else:
                    checker.chunk(answer, 1, steps_before=self.steps)
            except BadAnswerError as error:
                raise self._pool.reject(0, error) from None
        except EnvWorkerError as error:
            self.phase, self.message = Phase.FAILED, f"the simulator failed: {str(error).splitlines()[0]}"
            return None
        return answer

"""The episodes that a person plays or corrects: simulator, recording, and the choice of tasks and initial states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from rlvla.data.robomimic import INTERVENTIONS, DemonstrationWriter
from rlvla.envs.base import Observation, TaskSpec
from rlvla.envs.experts.episode import EpisodeRecorder
from rlvla.envs.workers.answer_checks import AnswerChecker, BadAnswerError
from rlvla.envs.workers.messages import EnvSpec, Reset, StepChunk
from rlvla.envs.workers.pool import EnvWorkerError
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.teleoperation.pilot import Pilot


class Phase(StrEnum):
    """State of an episode."""

    STARTING = "starting"
    PLAYING = "playing"
    ENDED = "ended"  # by success, a failure, or a limit
    FAILED = "failed"  # the simulator failed


@dataclass
class KeptEpisodes:
    """Sums over the kept episodes.

    Attributes:
        steps: their steps.
        interventions: steps at which the person acted.
        unaided: successful episodes without an intervention.
    """

    steps: int = 0
    interventions: int = 0
    unaided: int = 0


class Session:
    """Episodes in the first slot of a pool. Methods block, and must not run at the same time.

    Each episode is of the task with the fewest kept ones.

    Args:
        pool: the worker.
        options: keyword arguments of `make_env`.
        tasks: the tasks.
        planned: task id -> initial states and seeds of its episodes.
        writer: receives the kept episodes.
        pilot: a policy that acts beside the person; each step then records who acted.
        keep_failures: whether episodes without success can be kept.

    Attributes:
        pilot: see above.
        task: task of the current episode.
        phase: its state.
        observation: the latest observation; None before the first reset.
        success: whether the latest step was successful.
        message: how the episode ended or failed; "" while it is played.
        kept: number of kept episodes by task id.
        totals: sums over them.
        played: number of started episodes.
    """

    def __init__(
        self,
        pool: WatchedPool,
        options: dict[str, Any],
        tasks: Sequence[TaskSpec],
        planned: Mapping[int, Iterator[tuple[int, int]]],
        writer: DemonstrationWriter,
        pilot: Pilot | None = None,
        *,
        keep_failures: bool = True,
    ):
        self._pool, self._options, self._tasks, self._planned, self._writer = pool, options, tasks, planned, writer
        self._checkers = {task.task_id: AnswerChecker(task, options) for task in tasks}
        self.pilot, self._keep_failures = pilot, keep_failures
        self._start = 0, 0  # initial state and seed
        self._recorder: EpisodeRecorder | None = None
        self.task = tasks[0]
        self.phase = Phase.STARTING
        self.observation: Observation | None = None
        self.success = False
        self.message = ""
        self.kept = {task.task_id: 0 for task in tasks}
        self.totals = KeptEpisodes()
        self.played = 0

    @property
    def steps(self) -> int:
        """Steps of the current episode."""
        return 0 if self._recorder is None else len(self._recorder)

    @property
    def interventions(self) -> int:
        """Steps of the current episode at which the person acted, beside a pilot."""
        return 0 if self._recorder is None else sum(self._recorder.interventions)

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
            if self.pilot is not None:
                self.pilot.begin(self.task, self._start[1])

    def decide(self) -> None:
        """The pilot chooses its next chunk, if none is left."""
        assert self.pilot is not None and self.observation is not None
        if self.pilot.needs_decision:
            self.pilot.decide(self.observation)

    def step(self, action: np.ndarray, *, intervention: bool = False) -> None:
        """Execute an action [D] of the current episode, which must be playing.

        Args:
            action: the action.
            intervention: the person acts instead of the pilot, which decides anew afterwards.
        """
        assert self._recorder is not None
        if self.pilot is not None and intervention:
            self.pilot.release()
        result = self._call(StepChunk(action[None]))
        if result is None:
            return
        self._recorder.add(action, result, intervention=intervention)
        if self.pilot is not None:
            self.pilot.follow(result)
        self.observation, self.success = result.observation, bool(result.successes[0])
        if result.terminated or result.truncated:
            self.phase = Phase.ENDED
            reason = "the episode ended in a failure" if result.terminated else "the step limit is reached"
            self.message = "success" if result.success_at_end else f"no success: {reason}"

    @property
    def keep_problem(self) -> str:
        """Why the current episode cannot be kept; "" if it can."""
        if self._recorder is None or not len(self._recorder) or self.phase is Phase.FAILED:
            return "nothing to keep: the episode has no steps, or the simulator failed"
        if not self._keep_failures and not self._recorder.success_at_end:
            return "not kept: the episode has not ended in success, and --keep all is not given"
        return ""

    def keep(self) -> None:
        """Write the current episode, which must have no `keep_problem`, and start the next."""
        assert self._recorder is not None
        episode, flags = self._recorder.episode(), np.array(self._recorder.interventions)
        more = {} if self.pilot is None else {"more": {INTERVENTIONS: flags}}
        self._writer.add({**episode, **more}, self.task.task_id)
        self._writer.flush()
        self.totals.steps += len(flags)
        self.totals.interventions += int(flags.sum())
        self.totals.unaided += bool(episode["success_at_end"] and not flags.any())
        self.kept[self.task.task_id] += 1
        self._recorder = None  # never written twice, even if the next reset fails
        self.begin()

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

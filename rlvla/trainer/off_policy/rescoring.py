"""Rescoring: missing or old scores of replayed decisions are requested while the next episodes are played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvla.envs.base import Observation, TaskSpec
from rlvla.rewards.base import EpisodeReward, EpisodeStart, RewardSource, StepInfo, scores_of_decisions
from rlvla.trainer.off_policy.memory import TASK, Memory


@dataclass
class _Question:
    """An episode of the buffer sent to a judge."""

    number: int
    rows: NDArray[np.int64]
    steps: NDArray[np.int64]
    reward: EpisodeReward


class Rescoring:
    """Requests scores of whole episodes of a buffer from a judge, and stores them one iteration later.

    Args:
        judge: its episodes have `scores` and read images only.
        tasks: tasks of the run.
        interval: updates after which scores are old.
        budget: decisions per request; the last episode may exceed it.
    """

    def __init__(self, judge: RewardSource, tasks: Sequence[TaskSpec], interval: int, budget: int):
        self._judge, self._tasks = judge, {task.task_id: task for task in tasks}
        self._interval, self._budget = interval, budget
        self._asked: list[_Question] = []

    def ask(self, memory: Memory, now: int) -> int:
        """Request scores of the episodes of decisions that are due, those without a score first.

        Args:
            memory: its buffer has columns `images` and `task`.
            now: updates so far.

        Returns:
            Number of decisions to be scored.
        """
        asked, due = 0, memory.buffer.due(now, self._interval, self._budget)
        for number in dict.fromkeys(memory.buffer.gather(due, ["episode"])["episode"].tolist()):
            if asked >= self._budget:
                break
            self._asked.append(self._question(memory, number))
            asked += len(self._asked[-1].steps)
        return asked

    def _question(self, memory: Memory, number: int) -> _Question:
        buffer = memory.buffer
        rows = buffer.rows_of(number)
        frames = buffer.gather(rows, ["images"])["images"]
        stored = buffer.gather(rows[:-1], [TASK, "steps", "terminated", "truncated", "init_state"])
        task = self._tasks[int(stored[TASK][0])]
        instructions = memory.instructions(rows) or [task.instruction] * len(rows)
        observations = [Observation(images, None, text) for images, text in zip(frames, instructions)]
        reward = self._judge.create(task, EpisodeStart(observations[0], int(stored["init_state"][0])))
        for steps, after in zip(stored["steps"], observations[1:]):
            for step in range(1, steps + 1):
                info = StepInfo(success=False, terminated=False, truncated=False)
                reward.step(after if step == steps else None, frozenset(), info)
        if hasattr(reward, "end"):
            reward.end(**{name: bool(stored[name][-1]) for name in ("terminated", "truncated")})
        return _Question(number, rows[:-1], stored["steps"], reward)

    def collect_scores(self, memory: Memory, now: int) -> None:
        """Wait for the scores of the last questions and store them; decisions that were overwritten are skipped."""
        asked, self._asked = self._asked, []
        for question in asked:
            question.reward.finish()
            judged: Any = question.reward  # with `scores`, see above
            scores = scores_of_decisions(question.steps, judged.scores())
            question.reward.release()
            episodes = np.full(len(question.rows), question.number)
            action_score, progress = scores.astype(np.float64).T
            memory.buffer.update(question.rows, episodes, now=now, action_score=action_score, progress=progress)

    def state_dict(self) -> dict[str, Any]:
        """The episodes whose scores are pending."""
        return {"asked": [question.number for question in self._asked]}

    def load_state_dict(self, state: Mapping[str, Any], memory: Memory) -> None:
        """Request scores of the same episodes again."""
        self._asked = [self._question(memory, number) for number in state["asked"]]

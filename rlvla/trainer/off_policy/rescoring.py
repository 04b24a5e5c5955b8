"""Scores of replayed decisions that are missing or old: asked for again while the next episodes are played."""

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
    """An episode of the buffer that a judge looks at again."""

    number: int
    rows: NDArray[np.int64]
    steps: NDArray[np.int64]
    reward: EpisodeReward


class Rescoring:
    """Asks a judge about whole episodes of a buffer, and puts its answers into it one iteration later.

    Args:
        judge: its episodes have `scores`, and look at images alone.
        tasks: by their ids.
        interval: updates after which scores are old.
        budget: decisions asked about at a time; the last episode may exceed it.
    """

    def __init__(self, judge: RewardSource, tasks: Sequence[TaskSpec], interval: int, budget: int):
        self._judge, self._tasks = judge, {task.task_id: task for task in tasks}
        self._interval, self._budget = interval, budget
        self._asked: list[_Question] = []

    def ask(self, memory: Memory, now: int) -> int:
        """Ask about the episodes of decisions that are due, those without a score first.

        Args:
            memory: whose buffer has columns `images` and `task`.
            now: updates so far.

        Returns:
            Number of decisions asked about.
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
        found = buffer.gather(rows[:-1], [TASK, "steps", "terminated", "truncated", "init_state"])
        task = self._tasks[int(found[TASK][0])]
        words = memory.instructions(rows) or [task.instruction] * len(rows)
        seen = [Observation(images, None, text) for images, text in zip(frames, words)]
        reward = self._judge.create(task, EpisodeStart(seen[0], int(found["init_state"][0])))
        for steps, after in zip(found["steps"], seen[1:]):
            for step in range(1, steps + 1):
                info = StepInfo(success=False, terminated=False, truncated=False)
                reward.step(after if step == steps else None, frozenset(), info)
        ended = {name: bool(found[name][-1]) for name in ("terminated", "truncated")}
        if hasattr(reward, "end"):
            reward.end(**ended)
        return _Question(number, rows[:-1], found["steps"], reward)

    def collect_scores(self, memory: Memory, now: int) -> None:
        """Wait for the scores of the last questions and store them; decisions that were overwritten are skipped."""
        asked, self._asked = self._asked, []
        for question in asked:
            question.reward.finish()
            given: Any = question.reward
            scores = scores_of_decisions(question.steps, given.scores())
            question.reward.release()
            episodes = np.full(len(question.rows), question.number)
            action_score, progress = scores.astype(np.float64).T
            memory.buffer.update(question.rows, episodes, now=now, action_score=action_score, progress=progress)

    def state_dict(self) -> dict[str, Any]:
        """The episodes that are asked about."""
        return {"asked": [question.number for question in self._asked]}

    def load_state_dict(self, state: Mapping[str, Any], memory: Memory) -> None:
        """Ask about the same episodes of the memory, as it was then."""
        self._asked = [self._question(memory, number) for number in state["asked"]]

"""Episodes of a person: the choice of tasks and states, without a simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlvla.data.robomimic import DemonstrationWriter
from rlvla.envs import ChunkResult, Observation, TaskSpec
from rlvla.envs.workers.messages import Reset
from rlvla.teleoperation.session import Phase, Session

TASKS = [
    TaskSpec(suite="two", task_id=i, name=name, instruction=name, max_steps=1, action_dim=2)
    for i, name in enumerate(["push", "reach"])
]


class OneStepPool:
    """Episodes that end with their first step; `starts` lists task and initial state of each."""

    def __init__(self) -> None:
        self.starts: list[tuple[int, int]] = []

    def call(self, slot: int, command: Any) -> Observation | ChunkResult:
        observation = Observation(np.zeros((1, 8, 8, 3), np.uint8), None, "do it")
        if isinstance(command, Reset):
            self.starts.append((command.env.task_id, command.init_state_id))
            return observation
        zeros = np.zeros(1, np.float32)
        return ChunkResult(observation, 1, zeros, np.zeros(1, bool), False, True, False)


def test_the_task_with_the_fewest_kept_episodes_is_next(tmp_path: Path) -> None:
    writer = DemonstrationWriter(tmp_path / "demos.hdf5", {"task_suite_name": "two"}, ["top"])
    pool: Any = OneStepPool()
    planned = {0: iter([(10, 0), (11, 0), (12, 0)]), 1: iter([(20, 0), (21, 0), (22, 0)])}
    session = Session(pool, {"cameras": ("top",), "image_size": 8}, TASKS, planned, writer)
    for order in ("begin", "keep", "restart", "begin", "keep", "keep"):
        if order == "keep":
            session.step(np.zeros(2, np.float32))
            assert session.phase is Phase.ENDED and session.message == "no success: the step limit is reached"
        getattr(session, order)()
    assert pool.starts == [(0, 10), (1, 20), (1, 20), (1, 21), (0, 11), (1, 22)]
    writer.abort()

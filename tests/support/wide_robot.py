"""Custom module: a robot with two cameras of 64 x 48 pixels, as in the dataset `ds_nonsquare`."""

from __future__ import annotations

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.envs.chunks import ChunkRunner
from rlvla.envs.options import SuiteOptions
from rlvla.envs.registry import Suite, register_suite

TASK = TaskSpec("wide_robot", 0, "pick", "pick the cube", 4, 40, 6, 6, 30.0, ("success",))


def camera_image(position: np.ndarray) -> np.ndarray:
    """[48, 64, 3], brighter with the position, whose left third is dark."""
    image = np.full((48, 64, 3), 100 + int(100 * position[0]), np.uint8)
    image[:, :21] = 0
    return image


class WideRobot:
    """Never succeeds."""

    def __init__(self) -> None:
        self.task, self._run, self._position = TASK, ChunkRunner(TASK.max_steps, 1), np.zeros(6, np.float32)

    def reset(self, init_state_id: int, seed: int) -> Observation:
        self._run.begin()
        self._position = np.full(6, init_state_id / 40, np.float32)
        return self._look()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        frame = (lambda: camera_image(self._position)) if record_frames else None
        return self._run.play(actions, lambda action: (False, frozenset()), self._look, frame)

    def close(self) -> None:
        self._run.end()

    def _look(self) -> Observation:
        return Observation(np.stack([camera_image(self._position)] * 2), self._position.copy(), TASK.instruction)


register_suite(
    "wide_robot",
    Suite(lambda **kw: [TASK], lambda task_id, **kw: WideRobot(), ("front", "wrist"), options=SuiteOptions),
)

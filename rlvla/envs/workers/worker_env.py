"""Adapter that exposes an environment in a worker process as an `Env`.

For interactive use of a simulator in another interpreter, and for running the contract tests through a worker.
"""

from __future__ import annotations

from typing import TypeVar, cast

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_chunk, check_init_state_id
from rlvla.envs.workers.answer_checks import AnswerChecker, BadAnswerError
from rlvla.envs.workers.messages import Command, EnvSpec, Make, PrivilegedState, Reset, StepChunk
from rlvla.envs.workers.pool import EnvPool, EnvWorkerError

_T = TypeVar("_T")


class WorkerEnv:
    """One task in a worker of a pool that is otherwise idle.

        with EnvPool(1, python="robosuite15/bin/python") as pool:
            env = WorkerEnv(pool, 0, EnvSpec("robosuite", 0, {"image_size": 128}))

    Closing the environment does not close the pool.

    Args:
        pool: pool with the worker.
        worker_id: index of the worker.
        spec: the environment to build.

    Raises:
        ConfigError, EnvWorkerError: the environment cannot be built.
        BadAnswerError: the environment violates the contract; also raised by all methods.
    """

    def __init__(self, pool: EnvPool, worker_id: int, spec: EnvSpec):
        self._pool, self._worker_id, self._spec = pool, worker_id, spec
        self._closed = False
        self.task: TaskSpec = self._call(Make(spec), TaskSpec)
        self._checker, self._steps = AnswerChecker(self.task, spec.options), 0

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, num_init_states)."""
        check_init_state_id(self.task, init_state_id)
        observation = self._call(Reset(self._spec, init_state_id, seed), Observation)
        self._checker.observation(observation)
        self._steps = 0
        return observation

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D] until done; see `Env.step_chunk`."""
        # Checked before sending: a worker discards its environment after an exception.
        actions = check_chunk(actions, self.task)
        self._require_present()
        result = self._call(StepChunk(actions, record_frames), ChunkResult)
        self._checker.chunk(result, len(actions), steps_before=self._steps, record_frames=record_frames)
        self._steps += result.steps_executed
        return result

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state for scripted experts."""
        self._require_present()
        state = cast(dict[str, np.ndarray], self._call(PrivilegedState(), dict))
        self._checker.privileged_state(state)
        return state

    def close(self) -> None:
        """Close this adapter. Safe to call twice."""
        self._closed = True

    def _require_present(self) -> None:
        if self._pool.holds(self._worker_id) != self._spec:
            raise RuntimeError("no episode is running: call reset first")

    def _call(self, command: Command, kind: type[_T]) -> _T:
        if self._closed:
            raise RuntimeError("the environment has been closed")
        try:
            result = self._pool.call(self._worker_id, command)
        except EnvWorkerError as error:
            if error.error_type == "ValueError":
                raise ValueError(str(error)) from error
            raise
        if not isinstance(result, kind):
            raise BadAnswerError([f"expected {kind.__name__}, not {type(result).__name__}"])
        return result

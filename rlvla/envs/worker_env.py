"""An environment that lives in a worker process, behind the contract of one that lives here.

For trying a simulator of another interpreter by hand, and for running the contract tests through a worker.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions, check_init_state_id
from rlvla.envs.messages import Answer, Command, EnvSpec, Make, PrivilegedState, Reset, StepChunk
from rlvla.envs.pool import EnvWorkerError

_T = TypeVar("_T")


class CallablePool(Protocol):
    """What is asked of a pool, see `rlvla.envs.pool.EnvPool`."""

    def holds(self, worker_id: int) -> EnvSpec | None: ...  # noqa: D102

    def call(self, worker_id: int, command: Command, timeout: float | None = None) -> Answer: ...  # noqa: D102


class WorkerEnv:
    """One task in one worker of a pool that is otherwise idle.

        with EnvPool(1, python="robosuite15/bin/python") as pool:
            env = WorkerEnv(pool, 0, EnvSpec("robosuite", 0, {"image_size": 128}))

    Closing it leaves the pool alone, whose owner closes that.

    Args:
        pool: the workers.
        worker_id: which of them; it holds one environment at a time.
        spec: the environment.

    Raises:
        ConfigError, EnvWorkerError: it cannot be built.
    """

    def __init__(self, pool: CallablePool, worker_id: int, spec: EnvSpec):
        self._pool, self._worker_id, self._spec = pool, worker_id, spec
        self._closed = False
        self.task: TaskSpec = self._call(Make(spec), TaskSpec)

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, num_init_states)."""
        check_init_state_id(self.task, init_state_id)
        return self._call(Reset(self._spec, init_state_id, seed), Observation)

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D] until done; see `Env.step_chunk`."""
        # Here already: a worker throws its environment away after an exception.
        actions = check_actions(actions, self.task.action_dim, self.task.action_limit)
        self._require_present()
        return self._call(StepChunk(actions, record_frames), ChunkResult)

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state for scripted experts."""
        self._require_present()
        return cast(dict[str, np.ndarray], self._call(PrivilegedState(), dict))

    def close(self) -> None:
        """Be done with the environment. Safe to call twice."""
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
        assert isinstance(result, kind)
        return result

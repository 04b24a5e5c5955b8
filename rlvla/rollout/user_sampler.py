"""A task sampler of the user's own, given as FILE.py:CLASS (`--task_sampler`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlvla.envs import TaskSpec
from rlvla.rollout.episode import EpisodeRequest, FinishedEpisode
from rlvla.utils.errors import ConfigError, RunEnded
from rlvla.utils.modules import load_from_file, user_traceback


class TaskSamplerError(RunEnded):
    """The user's sampler or curriculum raised, asked for what cannot be played, or has a state that cannot be saved."""


class UserSampler:
    """Calls the user's sampler and checks what it asks for.

    The class is created on every rank with the arguments of `TaskSampler` and has a method `at(positions)`, which
    returns the episodes of the groups at these positions (a range) of an infinite sequence: for each position
    `n_samples_per_prompt` episodes that share a uid. Positions mean the same on every rank, and ranks ask for disjoint
    ranges. Optional:

    - `observe(episodes)`: the `FinishedEpisode`s of an iteration, of all ranks and in the same order on each;
    - `state_dict()` (JSON-serializable, equal on all ranks) and `load_state_dict(state)`, for checkpoints.

    Args:
        spec: file and name of the class.
        tasks, init_states, n_samples_per_prompt, seed: as for `TaskSampler`.

    Raises:
        ConfigError: the class cannot be loaded or created, or has no method `at`.
        TaskSamplerError: its state is not JSON-serializable; `observe` looks once more, after the first iteration.
    """

    def __init__(
        self,
        spec: str,
        tasks: Sequence[TaskSpec],
        init_states: Sequence[Sequence[int]],
        n_samples_per_prompt: int,
        seed: int,
    ):
        self._spec, self._path, self._size = spec, Path(spec.rpartition(":")[0]), n_samples_per_prompt
        self._allowed = {
            (task.suite, task.task_id): frozenset(states) for task, states in zip(tasks, init_states, strict=True)
        }
        kind = load_from_file(spec, "task_sampler", "class")
        try:
            self._sampler: Any = kind(tasks, init_states, n_samples_per_prompt, seed)
        except Exception as error:
            text = f"--task_sampler {spec} cannot be created:\n{user_traceback(error, self._path)}"
            raise ConfigError.of("task_sampler", "invalid_file", text) from error
        if not callable(getattr(self._sampler, "at", None)):
            text = f"--task_sampler {spec} has no method at(positions)"
            raise ConfigError.of("task_sampler", "mismatch", text)
        self._check_state()
        self._has_observed = False

    @property
    def observes(self) -> bool:
        """Whether it wants the finished episodes."""
        return hasattr(self._sampler, "observe")

    def at(self, positions: range) -> list[EpisodeRequest]:
        """The episodes of the groups at these positions.

        Raises:
            TaskSamplerError: the sampler raised, or did not return `n_samples_per_prompt` episodes for each
                position, each group with a uid of its own, all from the initial states for training.
        """
        requests = self._call("at", positions)
        if not isinstance(requests, (list, tuple)) or not all(isinstance(r, EpisodeRequest) for r in requests):
            raise self._refused("a list of EpisodeRequest is wanted")
        wanted = len(positions) * self._size
        if len(requests) != wanted:
            raise self._refused(f"{len(positions)} groups of {self._size} are wanted, not {len(requests)} episodes")
        groups = [requests[first : first + self._size] for first in range(0, wanted, self._size)]
        mixed = any(len({(r.uid, r.suite, r.task_id, r.init_state_id) for r in group}) > 1 for group in groups)
        if mixed or len({group[0].uid for group in groups}) < len(groups):
            raise self._refused("the episodes of a group need one task, one initial state, and a uid of their own")
        for request in requests:
            if request.init_state_id not in self._allowed.get((request.suite, request.task_id), ()):
                where = f"{request.suite} task {request.task_id}, initial state {request.init_state_id}"
                raise self._refused(f"{where} is not for training")
        return list(requests)

    def observe(self, episodes: Sequence[FinishedEpisode]) -> None:
        """Pass on the finished episodes of an iteration."""
        if self.observes:
            self._call("observe", list(episodes))
            if not self._has_observed:
                self._check_state()
            self._has_observed = True

    def state_dict(self) -> Any:
        """State of the user's sampler; None if it has none."""
        return self._call("state_dict") if hasattr(self._sampler, "state_dict") else None

    def load_state_dict(self, state: Any) -> None:
        """Restore a `state_dict`."""
        if state is not None and hasattr(self._sampler, "load_state_dict"):
            self._call("load_state_dict", state)

    def _check_state(self) -> None:
        try:
            json.dumps(self.state_dict())
        except (TypeError, ValueError, RecursionError) as error:
            raise self._refused(
                f"state_dict() must return what JSON can hold ({error}); convert arrays and numbers of numpy and torch "
                "with tolist() or item()"
            ) from error

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._sampler, method)(*arguments)
        except Exception as error:
            raise TaskSamplerError(
                f"--task_sampler {self._spec} raised in {method}:\n{user_traceback(error, self._path)}"
            ) from error

    def _refused(self, why: str) -> TaskSamplerError:
        return TaskSamplerError(f"--task_sampler {self._spec}: {why}")

"""Samplers of task instances: shuffled or weighted, by a curriculum, or a custom class (`--task_sampler`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlvla.algorithms import curricula
from rlvla.algorithms.curricula import TaskSuccess, task_shares
from rlvla.envs import TaskSpec
from rlvla.envs.task_values import TaskValues
from rlvla.rollout.config import TaskSamplingConfig
from rlvla.rollout.episode import EpisodeRequest, FinishedEpisode
from rlvla.utils.errors import ConfigError, Problem, RunEnded
from rlvla.utils.modules import load_from_file, user_traceback
from rlvla.utils.seeding import derive_rng, derive_seed

_WEIGHTS = TaskValues("task_weights", float, (0.0, 1e6), "TASK:WEIGHT, e.g. 3:0.5 or push:0.5")


class TaskSamplerError(RunEnded):
    """A custom sampler or curriculum failed, requested invalid episodes, or has a state that cannot be saved."""


def parse_task_weights(specs: Sequence[str], tasks: Sequence[TaskSpec]) -> list[float] | None:
    """`["0:2", "push:0.5"]` -> the weight of each task, by default 1; None without specs.

    Raises:
        ConfigError: malformed specs, unknown tasks, duplicates, negative weights, or no weight above 0.
    """
    weight_by_task, problems = _WEIGHTS.parse(specs, tasks)
    weights = [weight_by_task.get(task.task_id, 1.0) for task in tasks]
    if not problems and specs and not any(weights):
        text = f"--task_weights {' '.join(specs)}: at least one task needs a weight above 0"
        problems.append(Problem("task_weights", "out_of_range", text))
    if problems:
        raise ConfigError(problems)
    return weights if specs else None


class Sampler(Protocol):
    """Chooses the episodes to play; stateless by default."""

    @property
    def observes(self) -> bool:
        """Whether `observe` is to be called."""
        return False

    def at(self, positions: range) -> list[EpisodeRequest]:
        """The episodes of the groups at these positions of an infinite sequence, the same on every rank."""
        ...

    def observe(self, episodes: Sequence[FinishedEpisode]) -> None:
        """Process the finished episodes of an iteration, of all ranks and in the same order on each."""
        return None

    def state_dict(self) -> Any:
        """State for checkpoints, equal on all ranks; None without one."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore a `state_dict`."""
        return None


def make_sampler(
    config: TaskSamplingConfig,
    tasks: Sequence[TaskSpec],
    init_states: Sequence[Sequence[int]],
    n_samples_per_prompt: int,
    seed: int,
) -> Sampler:
    """Create the configured sampler; arguments as for `TaskSampler`.

    Raises:
        ConfigError: flags that do not fit the tasks, or a custom class that cannot be created.
    """
    instances = (tasks, init_states, n_samples_per_prompt, seed)
    if config.task_sampler is not None:
        return UserSampler(config.task_sampler, *instances)
    weights = parse_task_weights(config.task_weights, tasks)
    if config.task_sampling == "uniform":
        return TaskSampler(*instances, weights)
    return CurriculumSampler(*instances, weights, config)


class TaskSampler(Sampler):
    """Task instances for training, each repeated `n_samples_per_prompt` times under one uid.

    Instances (task, initial state) are visited in shuffled order, each once per epoch. With weights, the task of each
    group is drawn with a probability proportional to its weight and its initial state uniformly, independently.

    Args:
        tasks: training tasks.
        init_states: ids of the training initial states of each task.
        n_samples_per_prompt: group size.
        seed: seed of the run.
        weights: weight of each task, non-negative and not all 0; None: every initial state equally often.
    """

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        init_states: Sequence[Sequence[int]],
        n_samples_per_prompt: int,
        seed: int,
        weights: Sequence[float] | None = None,
    ):
        self._tasks = list(zip(tasks, init_states))
        self._shares = None if weights is None else np.asarray(weights, dtype=np.float64) / sum(weights)
        self._ends = np.cumsum([len(states) for states in init_states])  # of the tasks, in the sequence of instances
        self._group_size = n_samples_per_prompt
        self._seed = seed
        self._order: tuple[int, np.ndarray] | None = None

    def _instance(self, position: int) -> tuple[TaskSpec, int]:
        if self._shares is not None:
            rng = derive_rng(self._seed, "weighted task", position)
            task, states = self._tasks[rng.choice(len(self._tasks), p=self._shares)]
            return task, states[int(rng.integers(len(states)))]
        epoch, offset = divmod(position, int(self._ends[-1]))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, derive_rng(self._seed, "tasks", epoch).permutation(int(self._ends[-1])))
        instance = int(self._order[1][offset])
        number = int(np.searchsorted(self._ends, instance, side="right"))
        task, states = self._tasks[number]
        return task, states[instance - int(self._ends[number])]  # counted from the end of the states

    def at(self, positions: range) -> list[EpisodeRequest]:
        """The episodes of the groups at these positions of the infinite group sequence."""
        requests = []
        for position in positions:
            task, init_state = self._instance(position)
            for member in range(self._group_size):
                requests.append(
                    EpisodeRequest(
                        suite=task.suite,
                        task_id=task.task_id,
                        init_state_id=init_state,
                        seed=derive_seed(self._seed, "episode", position, member),
                        uid=f"group {position}",
                    )
                )
        return requests


class CurriculumSampler(TaskSampler):
    """Draws the task of each group by a curriculum, and its initial state uniformly.

    Args:
        tasks, init_states, n_samples_per_prompt, seed: as for `TaskSampler`.
        weights: factors of the curriculum's probabilities; None: 1.
        config: the curriculum and its settings.
    """

    @property
    def observes(self) -> bool:
        """True: it adapts to the success of tasks."""
        return True

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        init_states: Sequence[Sequence[int]],
        n_samples_per_prompt: int,
        seed: int,
        weights: Sequence[float] | None,
        config: TaskSamplingConfig,
    ):
        super().__init__(tasks, init_states, n_samples_per_prompt, seed)
        self._config = config
        self._factors = np.ones(len(tasks)) if weights is None else np.asarray(weights, dtype=np.float64)
        self._numbers = {(task.suite, task.task_id): number for number, task in enumerate(tasks)}
        self.success = TaskSuccess.unknown(len(tasks), config.task_success_horizon)
        try:
            self._update_shares()
        except TaskSamplerError as error:  # nothing has started yet
            raise ConfigError.of("task_sampling", "mismatch", str(error)) from error

    def observe(self, episodes: Sequence[FinishedEpisode]) -> None:
        """Update the success statistics and the probabilities of further groups.

        Raises:
            TaskSamplerError: a custom curriculum fails.
        """
        outcomes: dict[int, list[bool]] = {}
        for episode in episodes:
            outcomes.setdefault(self._numbers[episode.suite, episode.task_id], []).append(episode.success_at_end)
        for number, successes in outcomes.items():
            self.success.observe(number, successes)
        self._update_shares()

    def _update_shares(self) -> None:
        config = self._config
        try:
            self._shares = task_shares(
                config.task_sampling,
                self.success,
                self._factors,
                config.task_sampling_floor,
                config.curriculum_options,
            )
        except ValueError as error:
            cause = error.__cause__  # raised by a custom curriculum
            where = "" if cause is None else f":\n{user_traceback(cause, Path(curricula.__file__))}"
            raise TaskSamplerError(f"--task_sampling: {error}{where}") from error

    def state_dict(self) -> dict[str, Any]:
        """The means of success."""
        return {name: getattr(self.success, name).tolist() for name in ("recent", "earlier", "episodes")}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a `state_dict`; None, from a run with another sampler, leaves success unknown."""
        if state is not None:
            self.success = TaskSuccess(
                np.array(state["recent"]),
                np.array(state["earlier"]),
                np.array(state["episodes"]),
                self._config.task_success_horizon,
            )
            self._update_shares()


class UserSampler(Sampler):
    """Calls a custom sampler and validates its requests.

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
        TaskSamplerError: its state is not JSON-serializable; checked again after the first `observe`.
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
        """Whether the custom class has a method `observe`."""
        return hasattr(self._sampler, "observe")

    def at(self, positions: range) -> list[EpisodeRequest]:
        """The episodes of the groups at these positions.

        Raises:
            TaskSamplerError: the sampler raised, or did not return `n_samples_per_prompt` episodes for each position,
                or a group with a shared uid or with initial states that are not for training.
        """
        requests = self._call("at", positions)
        if not isinstance(requests, (list, tuple)) or not all(isinstance(r, EpisodeRequest) for r in requests):
            raise self._error("at(positions) must return a list of EpisodeRequest")
        expected = len(positions) * self._size
        if len(requests) != expected:
            raise self._error(
                f"at(positions) must return {len(positions)} groups of {self._size}, not {len(requests)} episodes"
            )
        groups = [requests[first : first + self._size] for first in range(0, expected, self._size)]
        mixed = any(len({(r.uid, r.suite, r.task_id, r.init_state_id) for r in group}) > 1 for group in groups)
        if mixed or len({group[0].uid for group in groups}) < len(groups):
            raise self._error("the episodes of a group need one task, one initial state, and a unique uid")
        for request in requests:
            if request.init_state_id not in self._allowed.get((request.suite, request.task_id), ()):
                where = f"{request.suite} task {request.task_id}, initial state {request.init_state_id}"
                raise self._error(f"{where} is not for training")
        return list(requests)

    def observe(self, episodes: Sequence[FinishedEpisode]) -> None:
        """Pass on the finished episodes of an iteration."""
        if self.observes:
            self._call("observe", list(episodes))
            if not self._has_observed:
                self._check_state()
            self._has_observed = True

    def state_dict(self) -> Any:
        """State of the custom sampler; None without one."""
        return self._call("state_dict") if hasattr(self._sampler, "state_dict") else None

    def load_state_dict(self, state: Any) -> None:
        """Restore a `state_dict`."""
        if state is not None and hasattr(self._sampler, "load_state_dict"):
            self._call("load_state_dict", state)

    def _check_state(self) -> None:
        try:
            json.dumps(self.state_dict())
        except (TypeError, ValueError, RecursionError) as error:
            raise self._error(
                f"state_dict() must be JSON-serializable ({error}); convert arrays and numbers of numpy and torch with "
                "tolist() or item()"
            ) from error

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._sampler, method)(*arguments)
        except Exception as error:
            raise self._error(f"{method} raised:\n{user_traceback(error, self._path)}") from error

    def _error(self, reason: str) -> TaskSamplerError:
        return TaskSamplerError(f"--task_sampler {self._spec}: {reason}")

"""Samples the task instances of each iteration: a function of the seed, the position, and what tasks succeeded."""

from __future__ import annotations

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
from rlvla.rollout.user_sampler import TaskSamplerError, UserSampler
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.modules import user_traceback
from rlvla.utils.seeding import derive_rng, derive_seed

_WEIGHTS = TaskValues("task_weights", float, (0.0, 1e6), "TASK:WEIGHT, e.g. 3:0.5 or push:0.5")


def parse_task_weights(specs: Sequence[str], tasks: Sequence[TaskSpec]) -> list[float] | None:
    """`["0:2", "push:0.5"]` -> the weight of each task; 1 where none is given, None without specs.

    Raises:
        ConfigError: malformed specs, unknown tasks, duplicates, negative weights, or no weight above 0.
    """
    given, problems = _WEIGHTS.parse(specs, tasks)
    weights = [given.get(task.task_id, 1.0) for task in tasks]
    if not problems and specs and not any(weights):
        text = f"--task_weights {' '.join(specs)}: at least one task needs a weight above 0"
        problems.append(Problem("task_weights", "out_of_range", text))
    if problems:
        raise ConfigError(problems)
    return weights if specs else None


class Sampler(Protocol):
    """Chooses the episodes to play.

    Attributes:
        observes: whether it wants the finished episodes.
    """

    observes: bool

    def at(self, positions: range) -> list[EpisodeRequest]:
        """The episodes of the groups at these positions of an infinite sequence, the same on every rank."""
        ...

    def observe(self, episodes: Sequence[FinishedEpisode]) -> None:
        """The finished episodes of an iteration, of all ranks, in the same order on each; if it `observes`."""
        ...

    def state_dict(self) -> Any:
        """Its state for checkpoints, equal on all ranks; None if it has none."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Restore a `state_dict`."""
        ...


def make_sampler(
    config: TaskSamplingConfig,
    tasks: Sequence[TaskSpec],
    init_states: Sequence[Sequence[int]],
    n_samples_per_prompt: int,
    seed: int,
) -> Sampler:
    """The sampler that the flags ask for; arguments as for `TaskSampler`.

    Raises:
        ConfigError: flags that do not fit the tasks, or a class of the user's own that cannot be created.
    """
    instances = (tasks, init_states, n_samples_per_prompt, seed)
    if config.task_sampler is not None:
        return UserSampler(config.task_sampler, *instances)
    weights = parse_task_weights(config.task_weights, tasks)
    if config.task_sampling == "uniform":
        return TaskSampler(*instances, weights)
    return CurriculumSampler(*instances, weights, config)


class TaskSampler:
    """Task instances for training, each repeated `n_samples_per_prompt` times under one uid.

    Instances (task, initial state) are visited in shuffled order, each once per epoch. With weights, the task of each
    group is drawn with a probability proportional to its weight and its initial state uniformly, independently.

    Args:
        tasks: training tasks.
        init_states: ids of the training initial states of each task.
        n_samples_per_prompt: group size.
        seed: seed of the run.
        weights: weight of each task, not negative and not all 0; None: every initial state equally often.
    """

    observes = False

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
        self._ends = np.cumsum([len(states) for states in init_states])  # of the instances of each task, in order
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

    def observe(self, episodes: Sequence[FinishedEpisode]) -> None:
        """Nothing is learned from them."""

    def state_dict(self) -> Any:
        """None: it has no state."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """There is nothing to restore."""


class CurriculumSampler(TaskSampler):
    """Draws the task of each group by a curriculum, and its initial state uniformly.

    Args:
        tasks, init_states, n_samples_per_prompt, seed: as for `TaskSampler`.
        weights: factors of the probabilities that the curriculum gives; None: 1.
        config: the curriculum and its settings.
    """

    observes = True

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
            self._decide()
        except TaskSamplerError as error:  # nothing has started yet
            raise ConfigError.of("task_sampling", "mismatch", str(error)) from error

    def observe(self, episodes: Sequence[FinishedEpisode]) -> None:
        """Count the outcomes; the next groups are drawn by them.

        Raises:
            TaskSamplerError: a curriculum of the user's own fails.
        """
        outcomes: dict[int, list[bool]] = {}
        for episode in episodes:
            outcomes.setdefault(self._numbers[episode.suite, episode.task_id], []).append(episode.success_at_end)
        for number, found in outcomes.items():
            self.success.observe(number, found)
        self._decide()

    def _decide(self) -> None:
        config = self._config
        try:
            self._shares = task_shares(config.task_sampling, self.success, self._factors, config.task_sampling_floor)
        except ValueError as error:
            cause = error.__cause__  # what a curriculum of the user's own raised
            where = "" if cause is None else f":\n{user_traceback(cause, Path(curricula.__file__))}"
            raise TaskSamplerError(f"--task_sampling: {error}{where}") from error

    def state_dict(self) -> dict[str, Any]:
        """The means of success."""
        found = self.success
        return {name: getattr(found, name).tolist() for name in ("recent", "earlier", "episodes")}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a `state_dict`; None, of a run with another way to choose tasks, leaves success unknown."""
        if state is not None:
            self.success = TaskSuccess(
                np.array(state["recent"]),
                np.array(state["earlier"]),
                np.array(state["episodes"]),
                self._config.task_success_horizon,
            )
            self._decide()

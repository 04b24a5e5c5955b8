"""Samples the task instances of each iteration. Stateless: iteration i is a function of the seed and i."""

from __future__ import annotations

from collections.abc import Sequence

from rlvla.envs import TaskSpec
from rlvla.rollout import EpisodeRequest
from rlvla.utils.seeding import derive_rng, derive_seed


class TaskSampler:
    """Task instances for training, each repeated `n_samples_per_prompt` times under one uid.

    Instances (task, initial state) are visited in shuffled order, each once per epoch.

    Args:
        tasks: training tasks.
        init_states: ids of the training initial states of each task.
        n_samples_per_prompt: group size.
        seed: seed of the run.
    """

    def __init__(
        self, tasks: Sequence[TaskSpec], init_states: Sequence[Sequence[int]], n_samples_per_prompt: int, seed: int
    ):
        self._instances = [(task, state) for task, states in zip(tasks, init_states) for state in states]
        self._group_size = n_samples_per_prompt
        self._seed = seed
        self._order: tuple[int, list[int]] | None = None

    def _instance(self, position: int) -> tuple[TaskSpec, int]:
        epoch, offset = divmod(position, len(self._instances))
        if self._order is None or self._order[0] != epoch:
            order = derive_rng(self._seed, "tasks", epoch).permutation(len(self._instances))
            self._order = (epoch, order.tolist())
        return self._instances[self._order[1][offset]]

    def draw(self, iteration: int, groups: range, groups_per_iteration: int) -> list[EpisodeRequest]:
        """The episodes of some groups of an iteration, e.g. those of one data-parallel rank.

        Args:
            iteration: counted from 0.
            groups: indices in [0, groups_per_iteration).
            groups_per_iteration: groups over all ranks.
        """
        first = iteration * groups_per_iteration
        return self.at(range(first + groups.start, first + groups.stop))

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

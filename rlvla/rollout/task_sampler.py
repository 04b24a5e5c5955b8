"""Samples the task instances of each iteration. Stateless: iteration i is a function of the seed and i."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvla.envs import TaskSpec
from rlvla.rollout import EpisodeRequest
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.seeding import derive_rng, derive_seed

LARGEST_WEIGHT = 1e6


def parse_task_weights(specs: Sequence[str], tasks: Sequence[TaskSpec]) -> list[float] | None:
    """`["0:2", "3:0.5"]` -> the weight of each task; 1 where none is given, None without specs.

    Raises:
        ConfigError: malformed specs, unknown tasks, duplicates, negative weights, or no weight above 0.
    """
    known, problems = {task.task_id: 1.0 for task in tasks}, []
    seen: set[int] = set()

    def report(reason: str, text: str) -> None:
        problems.append(Problem("task_weights", reason, f"--task_weights {text}"))

    for spec in specs:
        task, _, weight = spec.partition(":")
        try:
            number, value = int(task), float(weight)
        except ValueError:
            report("malformed", f"{spec}: write TASK_ID:WEIGHT, e.g. 3:0.5")
            continue
        if number not in known:
            report("unknown_name", f"{spec}: no such task is trained on; there are {', '.join(map(str, known))}")
        elif number in seen:
            report("duplicate", f"{spec}: task {number} is given twice")
        elif not 0 <= value <= LARGEST_WEIGHT:
            report("out_of_range", f"{spec}: a weight must be a number from 0 to {LARGEST_WEIGHT:g}")
        else:
            known[number] = value
        seen.add(number)
    if not problems and specs and not any(known.values()):
        report("out_of_range", f"{' '.join(specs)}: at least one task needs a weight above 0")
    if problems:
        raise ConfigError(problems)
    return list(known.values()) if specs else None


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
        self._instances = [(task, state) for task, states in zip(tasks, init_states) for state in states]
        self._group_size = n_samples_per_prompt
        self._seed = seed
        self._order: tuple[int, list[int]] | None = None

    def _instance(self, position: int) -> tuple[TaskSpec, int]:
        if self._shares is not None:
            rng = derive_rng(self._seed, "weighted task", position)
            task, states = self._tasks[rng.choice(len(self._tasks), p=self._shares)]
            return task, states[int(rng.integers(len(states)))]
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

"""Demonstrations played by scripted experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rlvla.commands.demos.config import CollectConfig
from rlvla.commands.demos.record import Attempt, complete_episodes, planned_episodes
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.workers.answer_checks import AnswerChecker
from rlvla.envs.workers.messages import EnvSpec, RunExpert
from rlvla.envs.workers.pool import EnvWorkerError
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class ExpertPlayer:
    """Plays the scripted expert of each task.

    Attributes:
        env: the environment.
        config: what is recorded.
        split: initial states.
        expert: the expert's errors.
    """

    name: ClassVar[str] = "expert"
    advice: ClassVar[str] = "lower its errors"

    env: EnvConfig
    config: CollectConfig
    split: SplitConfig
    expert: ExpertConfig

    def problems(self) -> list[Problem]:
        """Tasks that it cannot play."""
        found = []
        for task in self.env.tasks():
            found += (
                [
                    Problem(
                        "task_suite_name",
                        "primitives",
                        f"the scripted expert of {task.name} gives actions of the controller, not "
                        "primitives; leave "
                        "--action_space out",
                    )
                ]
                if task.primitives
                else []
            )
            try:
                make_expert(self.env.suite, task.task_id, self.expert)
            except ConfigError as error:
                found += error.problems
        return found

    def most_attempts(self, task: TaskSpec) -> int:
        """See `Player.most_attempts`."""
        return self.config.wanted(task) * self.config.max_attempts

    def attempts(self, pool: WatchedPool, task: TaskSpec) -> Iterator[Attempt | EnvWorkerError]:
        """See `Player.attempts`."""
        options = self.env.env_kwargs()
        spec = EnvSpec(task.suite, task.task_id, options)
        states, seed = self.split.train_states(task), self.config.seed
        planned = planned_episodes(task, states, seed, self.name, self.most_attempts(task))
        commands = (RunExpert(spec, init_state_id, number, self.expert) for init_state_id, number in planned)
        return complete_episodes(pool, commands, AnswerChecker(task, options))

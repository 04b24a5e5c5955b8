"""Reward machines during episodes, and their assignment to tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlvla.rewards.base import EpisodeReward, EpisodeStart, StepInfo, scores_of_progress
from rlvla.rewards.machine_files import declared_graph, is_declaration
from rlvla.rewards.machines import TASKS, check_propositions, formula_graph, machine_graph, task_graph
from rlvla.rewards.reward_machine import SUCCESS_EVENT, MachineGraph, MachineSettings, RewardMachine, default_grace
from rlvla.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec
    from rlvla.rewards.config import RewardConfig


class MachineSource:
    """Creates a reward machine for each episode.

    Attributes:
        needs_events: machines follow the events of the environment.
        gamma: discount of the shaping; the trainer sets it to the learner's.
        truncation_ends: whether the learner treats truncation as termination, so that the final potential must be 0.
    """

    needs_events = True

    def __init__(self, config: RewardConfig):
        self._config = config
        self.gamma = 0.99 if config.gamma_shaping is None else config.gamma_shaping
        self.truncation_ends = False
        self._graphs: dict[tuple[str, int, str | None], MachineGraph] = {}
        self._declared: MachineGraph | None = None
        if config.rm_formula is not None:
            if config.rm_machine != "auto":
                text = f"give --rm_formula or --rm_machine {config.rm_machine}, not both"
                raise ConfigError.of("rm_machine", "contradiction", text)
            try:
                formula_graph(config.rm_formula)
            except ConfigError as error:
                raise ConfigError(problem.of_flag("rm_formula") for problem in error.problems) from None
        elif is_declaration(config.rm_machine):
            try:
                self._declared = declared_graph(config.rm_machine)
            except ConfigError as error:
                raise ConfigError(problem.of_flag("rm_machine") for problem in error.problems) from None
        elif config.rm_machine not in ("auto", *TASKS):
            text = (
                f"--rm_machine {config.rm_machine}: there is none; known: auto, {', '.join(TASKS)}, or a file with the "
                "suffix .yaml or .json"
            )
            raise ConfigError.of("rm_machine", "unknown_name", text)

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Tasks without a machine, and machines with propositions that the environment does not provide."""
        problems: dict[Problem, None] = {}
        for task in tasks:
            try:
                self.graph(task)
            except ConfigError as error:
                flag: tuple[str, str | None] = ("reward", "rm")
                if self._config.rm_formula is not None:
                    flag = ("rm_formula", None)
                elif self._declared is not None:
                    flag = ("rm_machine", None)
                problems.update(dict.fromkeys(problem.of_flag(*flag) for problem in error.problems))
        return list(problems)

    def ends_episodes(self, tasks: Sequence[TaskSpec]) -> bool:
        """Whether a machine of these tasks can fail."""

        def can_fail(task: TaskSpec) -> bool:
            try:
                return bool(self.graph(task).failure)
            except ConfigError:
                return False  # see `problems`

        return any(map(can_fail, tasks))

    def graph(self, task: TaskSpec, goal: str | None = None) -> MachineGraph:
        """The machine of a task, or of the shorter task to reach its state `goal`, see `MachineGraph.towards`.

        Raises:
            ConfigError: there is none, or the environment does not provide its propositions.
        """
        key = (task.suite, task.task_id, goal)
        if key not in self._graphs:
            self._graphs[key] = self._make(task) if goal is None else self.graph(task).towards(goal)
        return self._graphs[key]

    def _available_propositions(self, task: TaskSpec) -> tuple[str, ...]:
        """Propositions that a machine may use in addition to success."""
        return task.propositions

    def _make(self, task: TaskSpec) -> MachineGraph:
        config, available = self._config, (*self._available_propositions(task), SUCCESS_EVENT)
        if config.rm_formula is not None:
            return formula_graph(config.rm_formula, available)
        if self._declared is not None:
            graph = self._declared
        elif config.rm_machine == "auto":
            graph = task_graph(task, ordered=config.rm_goal_order == "listed", stages=config.rm_goal_stages)
        else:
            graph = machine_graph(config.rm_machine)
        check_propositions(graph, available)
        return graph

    def settings(self, task: TaskSpec) -> MachineSettings:
        """Reward settings of a task's machine."""
        config = self._config
        return MachineSettings(
            mode=config.rm_mode,
            gamma=self.gamma,
            order=config.rm_order,
            advance=config.rm_advance,
            grace=default_grace(task.control_freq) if config.rm_grace is None else config.rm_grace,
            credit=config.rm_credit,
            transition_reward=config.rm_transition_reward,
            terminal_reward=config.rm_terminal_reward,
            potential_scale=config.rm_potential_scale,
            after_success=config.rm_after_success,
            validation=config.rm_validation,
        )

    def machine(self, task: TaskSpec, goal: str | None = None) -> RewardMachine:
        """A machine in its initial state; `goal` as in `graph`."""
        return RewardMachine(self.graph(task, goal), self.settings(task))

    def create(self, task: TaskSpec, episode: EpisodeStart) -> MachineReward:
        """Create the machine of one episode."""
        return MachineReward(self.machine(task), self.truncation_ends)


class MachineReward(EpisodeReward):
    """A machine during one episode.

    Args:
        machine: a machine in its initial state.
        truncation_ends: see `MachineSource`.
    """

    def __init__(self, machine: RewardMachine, truncation_ends: bool):
        self.machine, self._truncation_ends = machine, truncation_ends
        self.states = [machine.state]
        self._progress = [(0, machine.progress)]  # (executed steps, progress) at the start and at each decision

    @property
    def progress(self) -> float:
        """1 - distance / largest distance."""
        return self.machine.progress

    @property
    def failed(self) -> bool:
        """Whether the goal is unreachable."""
        return self.machine.failed

    def step(self, observation: Observation | None, events: frozenset[str], info: StepInfo) -> float:
        """The machine's reward for the step."""
        true_events = events | {SUCCESS_EVENT} if info.success else events
        ended = info.terminated or (info.truncated and self._truncation_ends)
        reward, _ = self.machine.step(true_events, terminated=ended)
        self.states.append(self.machine.state)
        if observation is not None:
            self._progress.append((len(self.states) - 1, self.machine.progress))
        return reward

    def scores(self) -> list[tuple[int, float, float]]:
        """Progress at each decision; the action is scored by its change, see `scores_of_progress`."""
        return scores_of_progress(self._progress)

    def finish(self) -> dict[str, Any]:
        """Final progress, whether the goal was reached, and the number of regressions."""
        machine = self.machine
        reached = machine.state in machine.graph.success
        return {"progress": machine.progress, "reached": reached, "regressions": machine.regressions}

"""The state of a reward machine as an observation of the policy: the current stage of the task.

The product of environment and machine state is what makes a reward machine's rewards Markovian: Icarte et al., "Reward
Machines: Exploiting Reward Function Structure in Reinforcement Learning", JAIR 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.rewards.base import EpisodeStart, StepInfo
from rlvla.rewards.config import STATE_INPUTS, RewardConfig
from rlvla.rewards.machine_files import declaration_of, is_declaration
from rlvla.rewards.machine_source import MachineReward, MachineSource
from rlvla.utils.data_files import check_types, field_types
from rlvla.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlvla.envs.base import ChunkResult, Observation, TaskSpec


@dataclass(frozen=True)
class StateInputSettings:
    """The reward machine whose state the policy observes, and its encoding; saved with the policy.

    Attributes:
        rm_state_input: "prompt" appends a phrase to the instruction; "proprio" appends a one-hot vector to proprio.
        width: length of the one-hot vector; 0 for the prompt.
        rm_machine: as in `RewardConfig`; the content of a file, as JSON.
        rm_formula, rm_goal_order, rm_goal_stages, rm_validation, rm_order, rm_advance, rm_grace, rm_after_success: see
            `RewardConfig`; they determine the state of the machine.
    """

    rm_state_input: str
    width: int = 0
    rm_machine: str = "auto"
    rm_formula: str | None = None
    rm_goal_order: str = "any"
    rm_order: str = "transition_first"
    rm_advance: str = "one"
    rm_grace: int | None = None
    rm_after_success: str = "terminate"
    rm_goal_stages: str = "predicates"
    rm_validation: bool = True

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> StateInputSettings:
        """The inverse of `as_dict`; ConfigError for anything else."""
        hints = field_types(cls)
        needed = set(hints) - {"rm_goal_stages", "rm_validation"}  # absent in records before version 0.2
        valid = isinstance(content, dict) and needed <= set(content) <= set(hints)
        if not valid or content["rm_state_input"] not in STATE_INPUTS[1:]:
            raise ConfigError(f"the checkpoint's record of its machine state is not readable: {content}")
        check_types(content, hints, "the checkpoint's record of its machine state")
        machine = content["rm_machine"]
        if is_declaration(machine) and not machine.startswith("{"):
            raise ConfigError(f"the checkpoint's record of its machine state names a file: {machine}")
        return cls(**content)


STATE_FLAGS = tuple(field.name for field in fields(StateInputSettings) if field.name.startswith("rm_"))


class StateInput:
    """Adds the state of each task's reward machine to the policy's observations.

    Args:
        settings: the machine and the form of the input.

    Raises:
        ConfigError: unknown machine or invalid formula.
    """

    def __init__(self, settings: StateInputSettings):
        self.settings = settings
        self._source = MachineSource(RewardConfig(**{name: getattr(settings, name) for name in STATE_FLAGS}))

    @classmethod
    def from_config(cls, config: RewardConfig, tasks: Sequence[TaskSpec]) -> StateInput | None:
        """From the flags; None for `--rm_state_input none`. ConfigError if a task has no machine."""
        if config.rm_state_input == "none":
            return None
        settings = StateInputSettings(**{name: getattr(config, name) for name in STATE_FLAGS})
        state_input = cls(settings)
        if is_declaration(settings.rm_machine):
            settings = replace(settings, rm_machine=declaration_of(settings.rm_machine))
        if settings.rm_state_input == "proprio":
            settings = replace(settings, width=max(len(state_input.states(task)) for task in tasks))
        return cls(settings)

    def states(self, task: TaskSpec) -> tuple[str, ...]:
        """States of a task's machine; ConfigError if it has none."""
        return self._source.graph(task).states

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Tasks without a machine, and machines with more states than the policy was trained with."""
        problems = self._source.problems(tasks)
        if problems or self.settings.rm_state_input == "prompt":
            return problems
        return [
            Problem(
                "rm_state_input",
                "mismatch",
                f"--rm_state_input proprio: the machine of {task.suite} task {task.name} has {len(self.states(task))} "
                f"states; the checkpoint was trained with at most {self.settings.width}",
            )
            for task in tasks
            if len(self.states(task)) > self.settings.width
        ]

    def begin(self, task: TaskSpec) -> EpisodeState:
        """Start the machine of an episode in its initial state."""
        machine = self._source.create(task, EpisodeStart())
        return EpisodeState(self.settings, self.states(task), machine)


class EpisodeState:
    """The machine during one episode; made by `StateInput.begin`."""

    def __init__(self, settings: StateInputSettings, states: Sequence[str], machine: MachineReward):
        self._settings, self._states, self._reward = settings, states, machine

    @property
    def width(self) -> int:
        """Length of the one-hot vector in proprio."""
        return self._settings.width

    @property
    def state(self) -> str:
        """The machine's state."""
        return self._reward.machine.state

    def follow(self, result: ChunkResult) -> None:
        """Advance the machine by the executed steps of a chunk."""
        for step in range(result.steps_executed):
            events = result.events[step] if result.events else frozenset()
            info = StepInfo(bool(result.successes[step]), terminated=False, truncated=False)
            self._reward.step(None, events, info)

    def observe(self, observation: Observation) -> Observation:
        """The observation with the machine's state added to its instruction or proprio."""
        if self._settings.rm_state_input == "prompt":
            return replace(observation, instruction=f"{observation.instruction}, stage {self.state}")
        one_hot = np.zeros(self._settings.width, dtype=np.float32)
        one_hot[self._states.index(self.state)] = 1.0
        assert observation.proprio is not None  # the checkpoint takes proprio: checked with the configuration
        return replace(observation, proprio=np.concatenate([observation.proprio, one_hot]))

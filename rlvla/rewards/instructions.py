"""Sub-instructions: the instruction of each decision, by the next proposition of a reward machine.

Ahn et al., "Do As I Can, Not As I Say", CoRL 2022, and Shi et al., "Hi Robot", ICML 2025, let a planner choose the
text that a language-conditioned policy receives; here the machine of the task does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rlvla.rewards.base import EpisodeStart, StepInfo
from rlvla.rewards.config import RewardConfig
from rlvla.rewards.machine_source import MachineReward, MachineSource
from rlvla.rewards.reward_machine import SUCCESS_EVENT
from rlvla.rewards.vlm.propositions import predicate_of
from rlvla.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlvla.envs.base import ChunkResult, Observation, TaskSpec

# Of the object or target that the task's instruction names.
_TEXTS = {
    "near": "move close to the target",
    "reached": "move to the target",
    "grasped": "grasp the object",
    "lifted": "lift the object",
    "above_bin": "move the object above its bin",
    "in_bin": "put the object into the bin",
    "pushed": "push the other object to its place",
    "placed": "put the object where it belongs and let go of it",
    "aligned": "move the object straight above the place where it belongs",
    "inserted": "insert the peg into the hole",
    "cubeA_grasped": "grasp the red cube",
    "cubeA_lifted": "lift the red cube",
    "cubes_aligned": "move the red cube straight above the green cube",
    "stacked": "put the red cube on the green cube and let go of it",
    "unlatched": "turn the handle of the door",
    "opened": "open the door",
    "contact": "touch the dirt on the table with the tool",
    "w25": "wipe away a quarter of the dirt",
    "w50": "wipe away half of the dirt",
    "w100": "wipe away all of the dirt",
    "behind": "move behind the object, on the side away from where it belongs",
    "touching": "touch the object",
    "near_zone": "push the object close to its zone",
    "in_zone": "push the object into its zone",
    "touched": "touch what the task wants to be opened, closed or switched",
}
# Predicates of LIBERO's goals and their stages, e.g. on_bowl_1_plate_1, grasped_bowl_1.
_PREDICATES = {
    "on": "put the {} on the {}",
    "in": "put the {} in the {}",
    "up": "stand the {} upright",
    "open": "open the {}",
    "close": "close the {}",
    "turnon": "turn on the {}",
    "turnoff": "turn off the {}",
    "near": "move to the {}",
    "grasped": "grasp the {}",
    "lifted": "lift the {}",
    "touched": "touch the {}",
}
_REGION = " contain region"  # of a container, e.g. basket_1_contain_region


def instruction_of(proposition: str) -> str:
    """The imperative text of a proposition; "{task}" stands for the task's instruction, which names the objects."""
    predicate, objects = predicate_of(proposition)
    objects = [] if proposition in _TEXTS else [name.removesuffix(_REGION) for name in objects]
    if len(objects) == _PREDICATES.get(predicate, "").count("{}") > 0:
        return _PREDICATES[predicate].format(*objects)
    return f"{{task}}: {_TEXTS.get(proposition) or proposition.replace('_', ' ')}"


class EpisodeInstructions(ABC):
    """The instructions of one episode."""

    @abstractmethod
    def decide(self, observation: Observation) -> str:
        """The instruction of a decision; `observation.instruction` is the task's."""

    @abstractmethod
    def step(self, events: frozenset[str], success: bool) -> None:
        """Process an executed step: the propositions that hold after it, and the success predicate."""

    def observe(self, observation: Observation) -> Observation:
        """The observation with the instruction of its decision."""
        return replace(observation, instruction=self.decide(observation))

    def follow(self, result: ChunkResult) -> None:
        """Process the executed steps of a chunk."""
        for step in range(result.steps_executed):
            self.step(result.events[step] if result.events else frozenset(), bool(result.successes[step]))


class InstructionSource(Protocol):
    """Chooses the instructions of a run's episodes."""

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Tasks for which it cannot work."""
        ...

    def begin(self, task: TaskSpec) -> EpisodeInstructions:
        """Start an episode."""
        ...


class MachineInstructions:
    """The next proposition of each task's reward machine as its instruction.

    Args:
        formula: an LTLf formula in place of the task's machine, or None.
        stages: stages of the machines of LIBERO's goals, one of `rlvla.rewards.machines.GOAL_STAGES`.
        texts: proposition -> text in place of `instruction_of`.

    Raises:
        ConfigError: invalid formula.
    """

    def __init__(self, formula: str | None = None, stages: str = "predicates", texts: Mapping[str, str] | None = None):
        config = RewardConfig(rm_formula=formula, rm_goal_stages=stages, rm_goal_order="listed")
        self._texts, self._formula = dict(texts or {}), formula
        try:
            self._machines = MachineSource(config)
        except ConfigError as error:
            raise ConfigError(problem.of_flag("instruction_formula") for problem in error.problems) from None

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Tasks without a machine, propositions that the environment does not provide, and texts of others."""
        problems: list[Problem] = []
        used: set[str] = set()
        for task in tasks:
            try:
                used.update(self._machines.graph(task).propositions)
            except ConfigError as error:
                if self._formula is not None:
                    problems += [problem.of_flag("instruction_formula") for problem in error.problems]
                    continue
                text = f"--instruction_source machine: {task.suite} task {task.name} has no reward machine; give a goal"
                text += " with --instruction_formula, or leave it out"
                problems.append(Problem("instruction_source", "unavailable", text))
        if not problems and (unused := sorted(self._texts.keys() - used)):
            text = f"--instruction_texts: no machine has {', '.join(unused)}; propositions: {', '.join(sorted(used))}"
            problems.append(Problem("instruction_texts", "unknown_name", text))
        return list(dict.fromkeys(problems))

    def begin(self, task: TaskSpec) -> EpisodeInstructions:
        """The instructions of an episode, with the machine in its initial state."""
        return _MachineEpisode(self._machines.create(task, EpisodeStart()), self._texts)


class _MachineEpisode(EpisodeInstructions):
    def __init__(self, reward: MachineReward, texts: Mapping[str, str]):
        self._reward, self._texts = reward, texts
        self._events: frozenset[str] = frozenset()
        self._next: dict[str, tuple[str, ...]] = {}  # of the states visited

    def decide(self, observation: Observation) -> str:
        """See `EpisodeInstructions`: the task's instruction if no proposition leads on."""
        machine = self._reward.machine
        if machine.state not in self._next:
            self._next[machine.state] = machine.graph.next_propositions(machine.state)
        missing = next((name for name in self._next[machine.state] if name not in self._events), None)
        if missing in (None, SUCCESS_EVENT):
            return observation.instruction
        text = self._texts.get(missing) or instruction_of(missing)
        return text.replace("{task}", observation.instruction)

    def step(self, events: frozenset[str], success: bool) -> None:
        """See `EpisodeInstructions`."""
        self._events = events
        self._reward.step(None, events, StepInfo(success, terminated=False, truncated=False))

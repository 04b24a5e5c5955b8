"""Sub-instructions: the instruction of each decision, from a reward machine or a planner.

A reward machine gives the text of its next proposition. A vision-language model plans as in Ahn et al., "Do As I Can,
Not As I Say", CoRL 2022, and Shi et al., "Hi Robot", ICML 2025.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rlvla.rewards.base import EpisodeStart, StepInfo
from rlvla.rewards.config import RewardConfig
from rlvla.rewards.machine_source import MachineReward, MachineSource
from rlvla.rewards.remote import url_problem
from rlvla.rewards.reward_machine import SUCCESS_EVENT
from rlvla.rewards.vlm.client import FailedAnswer, VLMClient, VLMResult
from rlvla.rewards.vlm.config import VLMServerConfig
from rlvla.rewards.vlm.propositions import predicate_of
from rlvla.rewards.vlm.questions import INSTRUCTION
from rlvla.rewards.vlm.scorers import Scorer
from rlvla.rewards.vlm.server import prompt_fields
from rlvla.rewards.vlm.server_check import server_problem
from rlvla.utils.errors import ConfigError, Problem, TrainingHalted
from rlvla.utils.terminal import log
from rlvla.utils.video import upright

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
_LONGEST_ANSWER = 200  # tokens of a planner's answer
_NextPropositions = dict[str, tuple[str, ...]]  # by the machine's state
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

    def begin(self, task: TaskSpec, *, wait: bool = False) -> EpisodeInstructions:
        """Start an episode; `wait` for the answer to each question, as for recorded episodes."""
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
        self._next: dict[tuple[str, int], _NextPropositions] = {}  # by task
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

    def begin(self, task: TaskSpec, *, wait: bool = False) -> EpisodeInstructions:
        """The instructions of an episode, with the machine in its initial state."""
        following = self._next.setdefault((task.suite, task.task_id), {})
        return _MachineEpisode(self._machines.create(task, EpisodeStart()), self._texts, following)


class _MachineEpisode(EpisodeInstructions):
    """An episode; `following` caches the next propositions of visited states for all episodes of the task."""

    def __init__(self, reward: MachineReward, texts: Mapping[str, str], following: _NextPropositions):
        self._reward, self._texts, self._next = reward, texts, following
        self._events: frozenset[str] = frozenset()

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


class PlannerInstructions:
    """Instructions of a vision-language model behind an OpenAI-compatible server.

    Args:
        url: base URL of the server.
        model: name of the model there.
        interval: environment steps between questions.
    """

    def __init__(self, url: str, model: str, interval: int):
        self._config = VLMServerConfig(vlm_url=url, vlm_model=model, vlm_max_tokens=_LONGEST_ANSWER)
        self._scorer, self._interval = Scorer(INSTRUCTION), interval
        self._client: VLMClient | None = None

    def problems(self, tasks: Sequence[TaskSpec]) -> list[Problem]:
        """Why the server cannot plan: it is sent a question."""
        unusable = url_problem(self._config.vlm_url or "", "instruction_url")
        problem = server_problem(self._config, self._scorer) if unusable is None else None
        if problem is None:
            return [unusable] if unusable else []
        text = problem.text.replace("--vlm_url", "--instruction_url").replace("--vlm_model", "--instruction_model")
        return [replace(problem, flag=(problem.flag or "").replace("vlm_", "instruction_") or None, text=text)]

    def begin(self, task: TaskSpec, *, wait: bool = False) -> EpisodeInstructions:
        """The instructions of an episode; without `wait` an answer counts from the first decision after it came."""
        return _PlannedEpisode(self, task, self._interval, wait=wait)

    def ask(self, task: TaskSpec, observation: Observation, instruction: str) -> Future[VLMResult]:
        """Ask for the instruction that follows `instruction`; returns immediately."""
        if self._client is None:
            self._client = VLMClient(self._config)
        images = [upright(image, task.images_flipped_vertically) for image in observation.images[:1]]
        prompt = self._scorer.prompt(**prompt_fields(task.name, observation), statement=instruction)
        return self._client.ask(self._scorer, prompt, images)

    def metrics(self) -> dict[str, float]:
        """Requests, failures, retries, tokens, seconds since the last call."""
        counts = {} if self._client is None else self._client.take_metrics()
        return {f"instruction/{name}": value for name, value in counts.items()}

    def check(self, metrics: Mapping[str, float]) -> None:
        """TrainingHalted if all requests of an iteration failed; some failures are a warning."""
        requests, failures = metrics.get("instruction/requests", 0.0), metrics.get("instruction/failures", 0.0)
        if not failures:
            return
        last = None if self._client is None else self._client.last_failure
        why = f"; the last one: {last.kind}: {last.message}" if last else ""
        text = f"{failures:.0f} of {requests:.0f} questions to --instruction_url {self._config.vlm_url} failed{why}"
        if failures >= requests:
            raise TrainingHalted(text)
        log.warning(f"{text}; the instruction before held")

    def close(self) -> None:
        """Cancel pending questions."""
        if self._client is not None:
            self._client.close()


class _PlannedEpisode(EpisodeInstructions):
    def __init__(self, planner: PlannerInstructions, task: TaskSpec, interval: int, *, wait: bool):
        self._planner, self._task, self._interval, self._wait = planner, task, interval, wait
        self._since = interval  # steps since the last question
        self._asked: Future[VLMResult] | None = None
        self._text = ""

    def decide(self, observation: Observation) -> str:
        """See `EpisodeInstructions`: the planner's last answer, the task's instruction before the first."""
        if self._asked is None and self._since >= self._interval:
            self._asked, self._since = self._planner.ask(self._task, observation, self._current(observation)), 0
        if self._asked is not None and (self._wait or self._asked.done()):
            answer, self._asked = self._asked.result(), None
            self._text = self._text if isinstance(answer, FailedAnswer) else answer.text
        return self._current(observation)

    def _current(self, observation: Observation) -> str:
        return self._text or observation.instruction

    def step(self, events: frozenset[str], success: bool) -> None:
        """See `EpisodeInstructions`."""
        self._since += 1

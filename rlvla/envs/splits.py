"""Splits of initial states into training and evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Protocol

from rlvla.envs.base import TaskSpec
from rlvla.envs.registry import is_known
from rlvla.utils.data_files import read_yaml
from rlvla.utils.errors import ConfigError

# heldout: never train on evaluation states. shared: train and evaluate on all states, as in most publications.
EVAL_PROTOCOLS = ("heldout", "shared")
HELD_OUT_FRACTION = 0.2


@dataclass(frozen=True)
class LearnedStates:
    """Initial states `start`..`stop - 1` of a task that a policy was trained on; an empty range if not recorded.

    Attributes:
        suite: the task's suite.
        task_id: the task; None means any task of the suite.
        start, stop: half-open range of state ids.
    """

    suite: str
    task_id: int | None
    start: int
    stop: int

    def of(self, task: TaskSpec) -> bool:
        """Whether the states belong to this task."""
        return self.suite == task.suite and self.task_id in (None, task.task_id)

    def may_be_of(self, task: TaskSpec) -> bool:
        """Whether the record allows that the states belong to this task."""
        return self.of(task) or not (self.recorded or is_known(self.suite))

    @property
    def recorded(self) -> bool:
        """Whether tasks or states are recorded, and not only the name of a suite or file."""
        return self.task_id is not None or bool(self.states)

    @property
    def states(self) -> range:
        """The state ids."""
        return range(self.start, self.stop)


class EvalStates(Protocol):
    """Selects the initial states of an evaluation."""

    @property
    def protocol_name(self) -> str:
        """Name of the selection in reports."""
        ...

    def eval_states(self, task: TaskSpec, n: int) -> list[int]:
        """Ids of n initial states; ConfigError if there are fewer."""
        ...


@dataclass(frozen=True)
class UnseenStates:
    """Validation on initial states outside the data, if possible also outside the states of the final evaluation.

    Attributes:
        seen: task id -> initial states in the data.
        before: other initial states that the policy was trained on.
    """

    seen: Mapping[int, frozenset[int]]
    before: tuple[LearnedStates, ...] = ()
    protocol_name: ClassVar[str] = "initial states outside of the data"

    def eval_states(self, task: TaskSpec, n: int) -> list[int]:
        """Ids of n training states outside the data; if there are too few, evaluation states (ConfigError if fewer)."""
        training, evaluation = _split(task, "heldout") if task.num_init_states > 1 else (range(1), range(0))
        used = [
            self.seen.get(task.task_id, frozenset()),
            *(learned.states for learned in self.before if learned.of(task)),
        ]
        most = 0
        for candidates in (training, evaluation):
            unseen = [i for i in candidates if not any(i in states for states in used)]
            if len(unseen) >= n:
                return unseen[:n]
            most = max(most, len(unseen))
        text = (
            f"--eval_episodes {n}: only {most} initial states of {task.name} are not in the demonstrations; give at "
            "most that, or --eval_epochs 0"
        )
        raise ConfigError.of("eval_episodes", "too_few", text)


def describe_learned_from(tasks: Sequence[TaskSpec], learned_from: Sequence[LearnedStates] | None) -> str:
    """Describe the training states of a policy with respect to the tasks it is evaluated on; None: not recorded."""
    if learned_from is None:
        return "which initial states it was trained on is not recorded"
    unknown = any(states.may_be_of(task) for states in learned_from if not states.recorded for task in tasks)
    own = [states for states in learned_from if states.recorded and any(states.of(task) for task in tasks)]
    ranges = [states for states in own if states.states]
    if own:
        trained = sum(any(states.of(task) for states in ranges or own) for task in tasks)
        which = f"{trained} of these {len(tasks)} tasks" if trained < len(tasks) else "each task"
        which = tasks[0].name if len(tasks) == 1 else which
        if not ranges:
            return f"trained on {which}; from which initial states is not recorded"
        span = f"{min(states.start for states in ranges)}..{max(states.stop for states in ranges) - 1}"
        more = ", and on others that are not recorded" if unknown or len(ranges) < len(own) else ""
        return f"trained on initial states {span} of {which}{more}"
    if unknown:
        return "which tasks and initial states it was trained on is not recorded"
    elsewhere = sorted({states.suite for states in learned_from} - {tasks[0].suite})
    if elsewhere:
        return f"trained in {', '.join(elsewhere)}; no initial state of these tasks was trained on"
    return "no initial state of these tasks is recorded as trained on"


def train_init_states(task: TaskSpec, protocol: str = "heldout") -> range:
    """Ids of the initial states for training and demonstrations.

    Args:
        task: the task.
        protocol: "heldout" excludes the last 20 % of the task's initial states (at least one); "shared" excludes none.

    Raises:
        ConfigError: unknown protocol, or too few initial states to split.
    """
    return _split(task, protocol)[0]


def eval_init_states(task: TaskSpec, protocol: str, n: int) -> list[int]:
    """Ids of the first n initial states for evaluation.

    Args:
        task: the task.
        protocol: "heldout" evaluates on the last 20 % of the task's initial states, "shared" on all.
        n: number of states.

    Raises:
        ConfigError: unknown protocol, too few initial states, or n exceeds the states of the protocol.
    """
    available = _split(task, protocol)[1]
    if not 1 <= n <= len(available):
        text = (
            f"cannot evaluate {task.suite} task {task.task_id} ({task.name}) on {n} initial states: protocol "
            f"'{protocol}' offers 1 to {len(available)}"
        )
        raise ConfigError.of("eval_episodes", "out_of_range", text)
    return list(available[:n])


@cache  # called once per task
def read_state_file(path: str) -> dict[str, list[int]] | list[int]:
    """Initial states to evaluate on: one list for all tasks, or task name (or id) -> list.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    try:
        content = read_yaml(Path(path))
    except ConfigError as error:
        raise ConfigError(problem.of_flag("eval_states_file") for problem in error.problems) from error
    lists = list(content.values()) if isinstance(content, dict) else [content]
    for states in lists or [None]:
        if not isinstance(states, list) or not states or not all(type(i) is int for i in states):
            text = (
                f"--eval_states_file {path}: give a list of initial state numbers, e.g. [8000, 8001], or one per task, "
                "e.g. Lift: [8000, 8001]"
            )
            raise ConfigError.of("eval_states_file", "invalid_file", text)
        if len(set(states)) != len(states):
            text = f"--eval_states_file {path} names an initial state twice; each is played once"
            raise ConfigError.of("eval_states_file", "duplicate", text)
    return {str(name): states for name, states in content.items()} if isinstance(content, dict) else content


def states_of_task(content: dict[str, list[int]] | list[int], task: TaskSpec, n: int, path: str) -> list[int]:
    """The first n states of a task from the content of `read_state_file`.

    Raises:
        ConfigError: the task is missing, a state does not exist, or there are fewer than n states.
    """
    named = content if isinstance(content, dict) else {task.name: content}
    states = named.get(task.name, named.get(str(task.task_id)))
    if states is None:
        text = f"--eval_states_file {path} does not name task {task.name}; it names {', '.join(named)}"
        raise ConfigError.of("eval_states_file", "mismatch", text)
    missing = [i for i in states if not 0 <= i < task.num_init_states]
    if missing:
        text = (
            f"--eval_states_file {path}: {task.name} has initial states 0..{task.num_init_states - 1}, not {missing[0]}"
        )
        raise ConfigError.of("eval_states_file", "out_of_range", text)
    if len(states) < n:
        text = f"--eval_states_file {path} holds {len(states)} initial states of {task.name}, fewer than {n}"
        raise ConfigError.of("eval_states_file", "too_few", text)
    return list(states[:n])


def check_disjoint(train_ids: Iterable[int], eval_ids: Iterable[int]) -> None:
    """Raise ConfigError if initial states for training and evaluation overlap."""
    # A range supports fast membership tests itself.
    train = train_ids if isinstance(train_ids, range) else set(train_ids)
    both = sorted({i for i in eval_ids if i in train})
    if both:
        shown = ", ".join(map(str, both[:5])) + (", ..." if len(both) > 5 else "")
        text = (
            f"{len(both)} initial states are used for training and for evaluation ({shown}); evaluate on others, or "
            "ask for this with --eval_protocol shared"
        )
        raise ConfigError.of("eval_protocol", "contradiction", text)


def _split(task: TaskSpec, protocol: str) -> tuple[range, range]:
    total = task.num_init_states
    if protocol == "shared":
        return range(total), range(total)
    if protocol != "heldout":
        text = f"unknown eval protocol '{protocol}'; known protocols: {', '.join(EVAL_PROTOCOLS)}"
        raise ConfigError.of("eval_protocol", "unknown_name", text)
    if total < 2:
        text = (
            f"{task.suite} task {task.task_id} ({task.name}) has {total} initial state(s), too few to hold any out; "
            "use --eval_protocol shared"
        )
        raise ConfigError.of("eval_protocol", "too_few", text)
    boundary = total - max(1, round(HELD_OUT_FRACTION * total))
    return range(boundary), range(boundary, total)

"""The interface between environments and the rollout engine.

Nothing in this package imports torch, so that worker processes start fast and stay small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlvla.utils.errors import ConfigError

_REQUIRED: Any = object()  # stands for the default of attributes that have none, between others that do
# The lowest valid value of whole numbers in a `TaskSpec`.
_LOWEST = {"task_id": 0, "max_steps": 1, "num_init_states": 1, "action_dim": 1, "proprio_dim": 0}


@dataclass(frozen=True)
class TaskSpec:
    """One task of a suite; write it with keywords.

    `suite`, `instruction`, `max_steps` and `action_dim` are required. Sequences become tuples and NumPy scalars Python
    numbers, so that a task equals its copy from a worker.

    Attributes:
        suite: registered name of the suite.
        task_id: index of the task inside the suite.
        name: short identifier, e.g. `Lift`; by default the name of the suite.
        instruction: language instruction for the policy. If it depends on the initial state (`toy_reach`), this is a
            template and `Observation.instruction` is the actual one.
        max_steps: environment steps after which an episode is truncated.
        num_init_states: initial states are numbered 0 .. num_init_states - 1.
        action_dim: D, length of one action vector.
        proprio_dim: P, length of the proprioceptive vector (0 if there is none).
        control_freq: environment steps per simulated second.
        propositions: all names that `ChunkResult.events` may contain, for reward machines.
        action_limit: actions are clipped to [-action_limit, action_limit]; above 1 for joint targets.
        images_flipped_vertically: images are stored bottom row first, as LIBERO policies expect; videos and reward
            models get them upright.
        gripper_dims: action dimensions that command a gripper, negative ones counted from the last; marked as not
            normalized in demonstrations.
        machine: reward machine of the task (`--rm_machine auto`): a name known to `rlvla.rewards.machines`, "chain"
            (the propositions are reached in order), "goals" (they must hold together, as in LIBERO), or an LTLf formula
            over the propositions; None if there is none.
        goals: for each goal of `machine` "goals" the propositions that lead to it, the goal's own last; by default
            every proposition is a goal.
        reward_range: lowest and highest reward of a step (`ChunkResult.rewards`); None if unknown. A result outside the
            range is rejected and its episode retried.
        primitives: action primitives to choose from, (name, number of parameters) each; () for ordinary actions. An
            action then holds a score per primitive (the argmax is executed, the first of equal ones) and the parameters
            of that primitive in [-1, 1]; further entries are ignored.
        macro_steps: the most environment steps that a primitive takes; 0 for ordinary actions. Otherwise chunks are
            [macro_steps, D]: the first row is the primitive, the other rows are ignored.
        step_action_dim: E, length of the ordinary actions that primitives consist of (`ChunkResult.step_actions`); 0
            for ordinary actions, and if primitives do not report them.
        reward_components: names of the terms in `ChunkResult.components`.
        instructions: all instructions of the task, if `instruction` is a template.
        category: category in a benchmark, e.g. the axis of the perturbation; "" if none.
        dense_reward: whether the rewards of steps (`ChunkResult.rewards`) are more than an indicator of success.

    Raises:
        TypeError: required attributes are missing; the message names all of them.
    """

    suite: str = _REQUIRED
    task_id: int = 0
    name: str = ""
    instruction: str = _REQUIRED
    max_steps: int = _REQUIRED
    num_init_states: int = 1000
    action_dim: int = _REQUIRED
    proprio_dim: int = 0
    control_freq: float = 10.0
    propositions: tuple[str, ...] = ()
    action_limit: float = 1.0
    images_flipped_vertically: bool = False
    gripper_dims: tuple[int, ...] = ()
    machine: str | None = None
    goals: tuple[tuple[str, ...], ...] = ()
    reward_range: tuple[float, float] | None = None
    primitives: tuple[tuple[str, int], ...] = ()
    macro_steps: int = 0
    step_action_dim: int = 0
    reward_components: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    category: str = ""
    dense_reward: bool = False

    def __post_init__(self) -> None:
        if missing := [name for name, value in vars(self).items() if value is _REQUIRED]:
            raise TypeError(f"a TaskSpec needs {', '.join(missing)}")
        object.__setattr__(self, "name", self.name or self.suite)
        for name, value in vars(self).items():
            object.__setattr__(self, name, _plain(value))
        if type(self.action_dim) is int and isinstance(self.gripper_dims, tuple):
            size = self.action_dim  # negative indices count from the last dimension
            dims = (d + size if type(d) is int and -size <= d < 0 else d for d in self.gripper_dims)
            object.__setattr__(self, "gripper_dims", tuple(dims))

    def problems(self) -> list[str]:
        """Validation errors, each with the expected value; [] for a valid task."""
        problems = [
            f"{name} must be a non-empty string, not {value!r}"
            for name in ("suite", "name", "instruction")
            if not isinstance(value := getattr(self, name), str) or not value
        ]
        for name, low in _LOWEST.items():
            if type(value := getattr(self, name)) is not int or value < low:
                problems.append(f"{name} must be an int of at least {low}, not {value!r}")
        for name in ("control_freq", "action_limit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
                problems.append(f"{name} must be a number greater than 0, not {value!r}")
        if isinstance(self.propositions, str):
            problems.append(f"propositions must be a tuple of names, not {self.propositions!r}")
        if type(self.action_dim) is int and (wrong := set(self.gripper_dims) - set(range(self.action_dim))):
            problems.append(f"gripper_dims must lie in 0..{self.action_dim - 1}, not {sorted(wrong)}")
        if self.reward_range is not None and not self.reward_range[0] <= self.reward_range[1]:
            problems.append(f"reward_range must be (lowest, highest), not {self.reward_range}")
        return problems


def _plain(value: Any) -> Any:
    """Convert sequences and arrays to tuples, and NumPy scalars to Python numbers."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(map(_plain, value))
    return value


@dataclass
class Observation:
    """Policy input at a decision.

    Attributes:
        images: [N, H, W, 3] uint8, one per camera, in the requested order.
        proprio: [P] float32, or None if not requested.
        instruction: language instruction.
        privileged: [P'] float32, proprio with privileged state, which the policy does not read, see `for_policy`; None
            in observations of the environment.
    """

    images: np.ndarray
    proprio: np.ndarray | None
    instruction: str
    privileged: np.ndarray | None = None

    def for_policy(self, proprio_dim: int) -> Observation:
        """The observation with the first `proprio_dim` numbers of proprio (0: None), and all of them as `privileged`.

        Options that show privileged state append it to proprio (`SuiteOptions.privileged_options`).
        """
        assert self.proprio is not None
        proprio = self.proprio[:proprio_dim] if proprio_dim else None
        return replace(self, proprio=proprio, privileged=self.proprio)


@dataclass
class ChunkResult:
    """Result of an action chunk of A actions, of which n <= A were executed.

    Attributes:
        observation: observation after the last executed action.
        steps_executed: n; smaller than A only if the episode ended inside the chunk, or if a primitive ended early
            (`TaskSpec.macro_steps`).
        rewards: [A] float32, the simulator's native reward of each step, finite, 0 where not executed. A simulator
            without one gives 1.0 at the step that terminates the episode with success, else 0. Used by `--reward env`.
        successes: [A] bool, success predicate after each executed step; False where not executed.
        terminated: the episode reached a terminal state: success held for `hold_steps` consecutive steps, or the
            simulator ended it at a success or at a failure (a fall, a broken part). Its value is not bootstrapped.
        truncated: a limit was reached without termination: the step limit, or one of the simulator. Its value is
            bootstrapped. Never True together with `terminated`.
        success_at_end: success had held for `hold_steps` when the last step was executed, or the simulator ended the
            episode at a success. False where `terminated` is a failure.
        events: for each executed step the set of propositions that hold, for reward machines.
        frames: [n, H, W, 3] uint8, first camera after each executed step, if frames are recorded.
        components: the task's `reward_components`, name -> [A] float32, finite, 0 where not executed. Reward
            sources may pay them; they are not part of `rewards`.
        step_actions: [n, E] float32, the ordinary action of each executed step of a primitive; None if the task's
            `step_action_dim` is 0. In an environment with ordinary actions, they reproduce the episode.
    """

    observation: Observation
    steps_executed: int
    rewards: np.ndarray
    successes: np.ndarray
    terminated: bool
    truncated: bool
    success_at_end: bool
    events: list[frozenset[str]] = field(default_factory=list)
    frames: np.ndarray | None = None
    components: dict[str, np.ndarray] = field(default_factory=dict)
    step_actions: np.ndarray | None = None


@runtime_checkable
class Env(Protocol):
    """An environment for one task.

    Equal (task, init_state_id, seed, actions) give equal trajectories, regardless of earlier episodes in the process.
    The initial state depends on (task, init_state_id) only, so that a split of the ids is a split of the states; `seed`
    controls all other randomness.
    """

    task: TaskSpec

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, num_init_states)."""
        ...

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D] float32, clipped to the task's `action_limit`, until the episode ends.

        Only the last observation is rendered, unless frames are recorded. Where the task has primitives, the chunk is
        one of them, see `TaskSpec.macro_steps`.

        Raises ValueError for a wrong shape or a non-finite action, RuntimeError if called before `reset` or after the
        end of the episode.
        """
        ...

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state for scripted experts; never shown to a policy."""
        ...

    def close(self) -> None:
        """Release the simulator. Safe to call twice."""
        ...


@runtime_checkable
class BatchedEnv(Protocol):
    """A simulator that steps several episodes of one task at once, each in its own slot.

    The trajectory of a slot depends only on (task, init_state_id, seed, actions) and is bitwise equal to that of the
    `Env` of the same task, regardless of the slot, of the other slots, and of which slots are stepped together.
    """

    task: TaskSpec

    def reset(self, slots: Sequence[int], init_state_ids: Sequence[int], seeds: Sequence[int]) -> list[Observation]:
        """Start an episode in each of these slots; the others are not affected. See `Env.reset`.

        Raises ValueError for a slot outside [0, num_slots), a repeated slot, or an unknown initial state.
        """
        ...

    def step_chunk(
        self, slots: Sequence[int], actions: np.ndarray, *, record_frames: bool = False
    ) -> list[ChunkResult]:
        """Execute actions [n, A, D] float32, one chunk per slot; see `Env.step_chunk`.

        An episode that ends inside its chunk stops there while the others continue. Raises as `Env.step_chunk`; after
        an error, no action has been executed in any slot.
        """
        ...

    def privileged_state(self, slot: int) -> dict[str, np.ndarray]:
        """Simulator state of one slot, for scripted experts; never shown to a policy."""
        ...

    def close(self) -> None:
        """Release the simulator. Safe to call twice."""
        ...


def check_actions(actions: np.ndarray, action_dim: int, limit: float = 1.0) -> np.ndarray:
    """Validate a chunk and clip it to [-limit, limit]; returns [A, D] float32.

    Raises:
        ValueError: not two-dimensional, empty, wrong D, or not finite.
    """
    actions = np.asarray(actions, dtype=np.float32)
    if actions.ndim != 2 or actions.shape[0] == 0 or actions.shape[1] != action_dim:
        raise ValueError(f"an action chunk must have shape [A, {action_dim}] with A >= 1, got {list(actions.shape)}")
    if not np.isfinite(actions).all():
        raise ValueError("an action chunk holds NaN or infinity")
    return np.clip(actions, -limit, limit)


def check_chunk(actions: np.ndarray, task: TaskSpec) -> np.ndarray:
    """Validate a chunk of a task and clip it to the task's `action_limit`; returns [A, D] float32.

    Raises:
        ValueError: as `check_actions`, or the task has primitives and chunks of another length.
    """
    actions = check_actions(actions, task.action_dim, task.action_limit)
    check_chunk_length(task, len(actions))
    return actions


def check_chunk_length(task: TaskSpec, length: int) -> None:
    """Raise ValueError if the task has primitives and chunks of another length."""
    if task.macro_steps and length != task.macro_steps:
        raise ValueError(
            f"a primitive of {task.suite} task {task.name} has the shape of {task.macro_steps} actions, of which the "
            f"first counts; got {length}"
        )


def check_init_state_id(task: TaskSpec, init_state_id: int) -> None:
    """Raise ValueError if the task has no such initial state."""
    if not 0 <= init_state_id < task.num_init_states:
        raise ValueError(
            f"{task.suite} task {task.task_id} ({task.name}) has initial states 0..{task.num_init_states - 1}, "
            f"not {init_state_id}"
        )


def task_of(suite: str, tasks: Iterable[TaskSpec], task_id: int) -> TaskSpec:
    """The task with this id; ConfigError listing the available tasks if there is none."""
    by_id = {task.task_id: task for task in tasks}
    if task_id not in by_id:
        available = ", ".join(f"{task.task_id} ({task.name})" for task in by_id.values())
        raise ConfigError(f"{suite} has no task {task_id}; its tasks: {available}")
    return by_id[task_id]

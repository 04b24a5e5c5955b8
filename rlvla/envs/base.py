"""The contract of an environment: what the rollout engine may ask and what it gets.

Nothing in this room imports torch, so that a worker process starts fast and stays small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class TaskSpec:
    """One task of a suite.

    Attributes:
        suite: registered name of the suite.
        task_id: index of the task inside the suite.
        name: short identifier, e.g. `Lift`.
        instruction: what the policy is told. Where the instruction depends on the initial state
            (`toy_reach`), this is a template and `Observation.instruction` holds the real one.
        max_steps: environment steps after which an episode is truncated.
        num_init_states: initial states are numbered 0 .. num_init_states - 1.
        action_dim: D, length of one action vector.
        proprio_dim: P, length of the proprioceptive vector (0: the suite has none).
        control_freq: environment steps per simulated second.
        propositions: every name that `ChunkResult.events` may contain, for reward machines.
        action_limit: actions are clipped to [-action_limit, action_limit]; more than 1 where they are joint targets.
        rows_from_below: the first row of its images is the lowest of the scene, as policies for LIBERO were trained;
            what people and judges see is turned over.
    """

    suite: str
    task_id: int
    name: str
    instruction: str
    max_steps: int
    num_init_states: int
    action_dim: int
    proprio_dim: int
    control_freq: float
    propositions: tuple[str, ...] = ()
    action_limit: float = 1.0
    rows_from_below: bool = False


@dataclass
class Observation:
    """What the policy sees at a decision.

    Attributes:
        images: [N, H, W, 3] uint8, one per camera, in the order they were asked for.
        proprio: [P] float32, or None where it was not asked for.
        instruction: the language command.
    """

    images: np.ndarray
    proprio: np.ndarray | None
    instruction: str


@dataclass
class ChunkResult:
    """What came of executing an action chunk of A actions, of which n <= A were executed.

    Attributes:
        observation: the state after the last executed action.
        steps_executed: n; smaller than A only if the episode ended inside the chunk.
        rewards: [A] float32, the environment's own reward: 1.0 at the step that terminates the episode
            with success, else 0; zero at steps that were not executed.
        successes: [A] bool, the success predicate after each executed step; False where not executed.
        terminated: success was held for `hold_steps` consecutive steps: the episode is over.
        truncated: the step limit was reached without termination. Never True together with `terminated`.
        success_at_end: success had been held for `hold_steps` when the last step was executed.
        events: one set of proposition names per executed step, for reward machines.
        frames: [n, H, W, 3] uint8, first camera after each executed step, where frames were asked for.
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


@runtime_checkable
class Env(Protocol):
    """An environment for one task.

    Equal (task, init_state_id, seed, actions) give equal trajectories, whatever ran before in the process.
    The initial state is a function of (task, init_state_id) alone, so that a split of the ids is a split of
    the states; `seed` drives whatever is random after that.
    """

    task: TaskSpec

    def reset(self, init_state_id: int, seed: int) -> Observation:
        """Start an episode. Raises ValueError for an `init_state_id` outside [0, num_init_states)."""
        ...

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        """Execute actions [A, D] float32 in [-1, 1] (clipped) until done, rendering only what will be seen.

        Where the task's `action_limit` is not 1, they are clipped to that.

        Raises ValueError for a wrong shape or a non-finite action, RuntimeError when called before `reset`
        or after the end of the episode.
        """
        ...

    def privileged_state(self) -> dict[str, np.ndarray]:
        """Simulator state for scripted experts; never shown to a policy."""
        ...

    def close(self) -> None:
        """Release the simulator. Safe to call twice."""
        ...


class SuccessTracker:
    """Counts how long success has held, and remembers whether it ever did.

    Args:
        hold_steps: consecutive successful steps after which an episode terminates (at least 1).
    """

    def __init__(self, hold_steps: int):
        self.hold_steps = hold_steps
        self.reset()

    def reset(self) -> None:
        """Forget the previous episode."""
        self.streak = 0
        self.once = False

    def update(self, success: bool) -> bool:
        """Take in one step; True when success has now been held long enough."""
        self.streak = self.streak + 1 if success else 0
        self.once |= success
        return self.streak >= self.hold_steps


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


def check_init_state_id(task: TaskSpec, init_state_id: int) -> None:
    """Raise ValueError if the task has no such initial state."""
    if not 0 <= init_state_id < task.num_init_states:
        raise ValueError(
            f"{task.suite} task {task.task_id} ({task.name}) has initial states 0..{task.num_init_states - 1}, "
            f"not {init_state_id}"
        )

"""Interventions: the scripted expert takes over from the policy within an episode, and gives control back."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlvla.envs.base import ChunkResult, TaskSpec
from rlvla.envs.experts.base import ExpertConfig
from rlvla.envs.workers.messages import StepExpert
from rlvla.utils.seeding import derive_seed


@dataclass(frozen=True)
class InterventionRule:
    """When the expert has control.

    It takes over once no proposition of the task has become true for the first time within `patience` steps, and gives
    control back as soon as one does. In the last `reserve` steps before the step limit it has control until the end.

    Attributes:
        patience: steps without progress; None: a quarter of the step limit.
        reserve: steps; None: half of the step limit.
        expert: the expert's errors.
    """

    patience: int | None = None
    reserve: int | None = None
    expert: ExpertConfig = field(default_factory=ExpertConfig)

    def begin(self, task: TaskSpec, seed: int) -> EpisodeInterventions:
        """The interventions of an episode; its seed generates the expert's errors."""
        patience = max(1, task.max_steps // 4) if self.patience is None else self.patience
        reserve = task.max_steps // 2 if self.reserve is None else self.reserve
        return EpisodeInterventions(self.expert, patience, task.max_steps - reserve, seed)


class EpisodeInterventions:
    """Interventions in one episode. Control changes at decisions only.

    Args:
        expert: the expert's errors.
        patience: steps without progress after which the expert takes over.
        deadline: step from which on it has control until the end.
        seed: of the expert's errors.

    Attributes:
        acting: whether the expert has control.
        flags: for each executed step whether the expert acted.
    """

    def __init__(self, expert: ExpertConfig, patience: int, deadline: int, seed: int):
        self._expert, self._patience, self._deadline, self._seed = expert, patience, deadline, seed
        self._reached: set[str] = set()  # propositions
        self._since_progress = 0  # steps
        self.acting, self.flags = False, list[bool]()

    def command(self, length: int) -> StepExpert | None:
        """The expert's next actions, at most `length`; None if the policy has control."""
        steps = len(self.flags)
        if self.acting:
            return StepExpert(length, self._expert)
        if self._since_progress < self._patience and steps < self._deadline:
            return None
        self.acting = True
        return StepExpert(length, self._expert, takeover=derive_seed(self._seed, "takeover", steps))

    def follow(self, result: ChunkResult) -> None:
        """Process an executed chunk."""
        self.flags += [self.acting] * result.steps_executed
        progress = set().union(*result.events) - self._reached
        self._reached |= progress
        self._since_progress = 0 if progress else self._since_progress + result.steps_executed
        if progress and len(self.flags) < self._deadline:
            self.acting = False

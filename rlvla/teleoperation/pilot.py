"""A policy that plays the episodes of a page until a person takes over."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.models.policy import RolloutPolicy, decide
from rlvla.rewards import StateInput
from rlvla.rewards.instructions import EpisodeInstructions, InstructionSource
from rlvla.rewards.state_input import EpisodeState
from rlvla.utils.errors import RunEnded
from rlvla.utils.seeding import derive_rng


class Pilot:
    """The policy with the rest of its current action chunk.

    Without interventions it acts as in a rollout of the same episode.

    Args:
        policy: decides.
        temperature: sampling temperature; None: greedy.
        state_input: adds the state of a reward machine to the observations; None: nothing.
        instructions: replaces the task's instruction at each decision; None: nothing.
    """

    def __init__(
        self,
        policy: RolloutPolicy,
        temperature: float | None = None,
        state_input: StateInput | None = None,
        instructions: InstructionSource | None = None,
    ):
        self._policy, self._temperature = policy, temperature
        self._state_input, self._instructions = state_input, instructions
        self._sub_instructions: EpisodeInstructions | None = None
        self._actions: deque[np.ndarray] = deque()
        self._rng = derive_rng(0, "sampling")
        self._state: EpisodeState | None = None
        self._limit = 1.0

    def begin(self, task: TaskSpec, seed: int) -> None:
        """Start an episode."""
        self._actions.clear()
        self._rng, self._limit = derive_rng(seed, "sampling"), task.action_limit
        self._state = None if self._state_input is None else self._state_input.begin(task)
        self._sub_instructions = None if self._instructions is None else self._instructions.begin(task)

    @property
    def needs_decision(self) -> bool:
        """Whether no action of the chunk is left."""
        return not self._actions

    def decide(self, observation: Observation) -> None:
        """Choose the next chunk.

        Raises:
            RunEnded: the actions hold NaN or infinity.
        """
        spec, proprio = self._policy.spec, None
        if spec.proprio_dim and observation.proprio is not None:  # privileged state may follow
            proprio = observation.proprio[: spec.proprio_dim - (self._state.width if self._state else 0)]
        observation = replace(observation, proprio=proprio)
        if self._sub_instructions is not None:
            observation = self._sub_instructions.observe(observation)
        if self._state is not None:
            observation = self._state.observe(observation)
        decision = decide(
            self._policy,
            [observation.images],
            [observation.proprio],
            [observation.instruction],
            noise=[spec.draw(self._rng)],
            temperature=self._temperature,
        )
        if not np.isfinite(decision.actions).all():
            raise RunEnded("the policy's actions hold NaN or infinity: its weights or dataset statistics are damaged")
        self._actions.extend(decision.actions[0])

    def take(self) -> np.ndarray:
        """The next action [D] of the chunk."""
        return np.clip(self._actions.popleft(), -self._limit, self._limit)

    def release(self) -> None:
        """Drop the rest of the chunk, as the person has taken over."""
        self._actions.clear()

    def follow(self, result: ChunkResult) -> None:
        """Process an executed step, of the policy or the person."""
        if self._sub_instructions is not None:
            self._sub_instructions.follow(result)
        if self._state is not None:
            self._state.follow(result)

"""One episode as a small state machine, from its request to the finished `Sample`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.experience import Sample
from rlvla.rewards import EpisodeRewards, EpisodeStart, RewardPlan, StateInput
from rlvla.utils.seeding import derive_rng


@dataclass(frozen=True)
class EpisodeRequest:
    """An episode to be played.

    Attributes:
        suite, task_id, init_state_id: the task instance.
        seed: drives the environment and, through a generator of its own, the sampling of actions; two episodes with
            equal requests and equal policies are equal.
        uid: the group the episode belongs to.
        record_frames: keep a frame of every step (for a video).
    """

    suite: str
    task_id: int
    init_state_id: int
    seed: int
    uid: str
    record_frames: bool = False


class Phase(enum.Enum):
    """Where an episode stands."""

    PENDING = "pending"
    CREATING = "creating"
    RESETTING = "resetting"
    READY = "waiting for the policy"
    STEPPING = "stepping"
    COMPLETED = "completed"
    FAILED = "failed"


class Episode:
    """Collects what happens in one episode.

    Args:
        request: what is played.
        task: the task's facts.
        rewards: what it is paid for.
        state_input: tells the policy more than the environment does; None: nothing.
    """

    def __init__(
        self, request: EpisodeRequest, task: TaskSpec, rewards: RewardPlan, state_input: StateInput | None = None
    ):
        self.request = request
        self.phase = Phase.PENDING
        self._task, self._plan = task, rewards
        self._rewards: EpisodeRewards | None = None
        self._state = None if state_input is None else state_input.begin(task)
        self._instruction = ""
        self._rng = derive_rng(request.seed, "sampling")
        self._action_dim = task.action_dim
        self._observations: list[Observation] = []
        self._tokens: list[np.ndarray] = []
        self._log_probs: list[np.ndarray] = []
        self._components: list[dict[str, np.ndarray]] = []
        self._executed: list[int] = []
        self._frames: list[np.ndarray] = []
        self._trace: list[tuple[frozenset[str], bool]] = []
        self._success_once = False
        self._success_now = False
        self._regressions = 0
        self._last: ChunkResult | None = None
        self._terminated = self._truncated = False

    @property
    def observation(self) -> Observation:
        """What the policy is to see now."""
        return self._observations[-1]

    @property
    def chunk_length(self) -> int:
        """A: actions of the chunk that is being executed."""
        return len(self._tokens[-1]) // self._action_dim

    def uniforms(self, num_tokens: int) -> np.ndarray:
        """[T] float64 in [0, 1): the random numbers of the next decision, from the episode's own generator."""
        return self._rng.random(num_tokens)

    def on_observation(self, observation: Observation) -> None:
        """The reset is done."""
        self._instruction = observation.instruction
        self._observations.append(observation if self._state is None else self._state.told(observation))
        start = EpisodeStart(observation, self.request.init_state_id, self.request.seed)
        self._rewards = self._plan.begin(self._task, start)
        self.phase = Phase.READY

    def on_decision(self, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """The policy has chosen tokens [T] with log-probabilities [T]."""
        self._tokens.append(tokens)
        self._log_probs.append(log_probs)
        self.phase = Phase.STEPPING

    def on_chunk(self, result: ChunkResult) -> None:
        """The chunk was executed."""
        assert self._rewards is not None
        self._components.append(self._rewards.score_chunk(result))
        self._executed.append(result.steps_executed)
        self._count_success(result.successes[: result.steps_executed])
        if result.frames is not None:
            self._frames.append(result.frames)
            self._trace += [
                (result.events[step] if result.events else frozenset(), bool(result.successes[step]))
                for step in range(result.steps_executed)
            ]
        self._last = result
        if self._state is not None:
            self._state.follow(result)
        self._observations.append(result.observation if self._state is None else self._state.told(result.observation))
        # A reward source may end an episode that the environment would go on with, at the end of a chunk. What has
        # failed is worth nothing more, even where the step limit comes with the same chunk.
        self._terminated = result.terminated or self._rewards.failed
        self._truncated = not self._terminated and (result.truncated or self._rewards.stalled)
        self.phase = Phase.COMPLETED if self._terminated or self._truncated else Phase.READY
        if self.phase is Phase.COMPLETED:
            self._rewards.end(terminated=self._terminated, truncated=self._truncated)

    def fail(self) -> None:
        """Its environment failed: nothing of this attempt is kept."""
        self.phase = Phase.FAILED
        if self._rewards is not None:
            self._rewards.release()

    def settle(self, sample: Sample, judged: dict[str, Any]) -> None:
        """Complete the rewards of the finished episode's sample; see `EpisodeRewards.settle`."""
        assert self._rewards is not None
        self._rewards.settle(sample, judged)
        self._rewards.release()

    def _count_success(self, successes: np.ndarray) -> None:
        """Take in the success predicate after each executed step of a chunk."""
        held = [self._success_now, *successes.tolist()]
        self._regressions += sum(before and not after for before, after in zip(held, held[1:]))
        self._success_now = held[-1]
        self._success_once |= any(held)

    def to_sample(self) -> Sample:
        """The finished episode, without rewards that come late; RuntimeError before it is completed."""
        if self.phase is not Phase.COMPLETED or self._last is None:
            raise RuntimeError(f"the episode is {self.phase.value}, not completed")
        components = {
            name: torch.from_numpy(np.stack([chunk[name] for chunk in self._components]))
            for name in self._components[0]
        }
        tokens = torch.from_numpy(np.stack(self._tokens)).long()
        position = torch.arange(tokens.shape[1]) // self._action_dim  # which action a token belongs to
        decisions, last = self._observations[:-1], self._observations[-1]
        proprio = None if last.proprio is None else torch.from_numpy(np.stack([o.proprio for o in decisions]))
        request = self.request
        return Sample(
            images=torch.from_numpy(np.stack([o.images for o in decisions])),
            proprio=proprio,
            instruction=self._instruction,
            action_tokens=tokens,
            rollout_log_probs=torch.from_numpy(np.stack(self._log_probs)),
            rewards=torch.stack(list(components.values())).sum(0),
            reward_components=components,
            action_mask=position[None] < torch.tensor(self._executed)[:, None],
            finish_step=sum(self._executed),
            success_once=self._success_once,
            success_at_end=self._last.success_at_end,
            terminated=self._terminated,
            truncated=self._truncated,
            last_images=torch.from_numpy(last.images),
            last_proprio=None if last.proprio is None else torch.from_numpy(last.proprio),
            uid=request.uid,
            suite=request.suite,
            task_id=request.task_id,
            init_state_id=request.init_state_id,
            seed=request.seed,
            regressions=self._regressions,
            frames=np.concatenate(self._frames) if self._frames else None,
            trace=self._trace or None,
            told=None if self._state is None else [o.instruction for o in self._observations],
            state_width=0 if self._state is None else self._state.width,
            rows_from_below=self._task.rows_from_below,
        )

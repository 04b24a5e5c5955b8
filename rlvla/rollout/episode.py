"""An episode as a state machine, from its request to the finished `Sample`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.experience import Sample
from rlvla.models.policy import RolloutPolicy
from rlvla.rewards import EpisodeRewards, EpisodeStart, PaidRewards, RewardPlan, StateInput
from rlvla.rewards.instructions import InstructionSource
from rlvla.rollout.interventions import InterventionRule
from rlvla.utils.seeding import derive_rng

_GRAY = 128


@dataclass(frozen=True)
class EpisodeRequest:
    """An episode to be played.

    Attributes:
        suite, task_id, init_state_id: the task instance.
        seed: seeds the environment and the sampling of actions; equal requests and policies give equal episodes.
        uid: id of the group that the episode belongs to.
        record_frames: keep a frame of every step, for videos.
        other_instructions: candidates that replace the instruction: the first one that differs from it.
        blind: the policy sees gray images; judges see the rendered ones.
    """

    suite: str
    task_id: int
    init_state_id: int
    seed: int
    uid: str
    record_frames: bool = False
    other_instructions: tuple[str, ...] = ()
    blind: bool = False


@dataclass(frozen=True)
class FinishedEpisode:
    """Outcome of an episode, available before late rewards.

    Attributes:
        suite, task_id, init_state_id, seed, uid: see `EpisodeRequest`.
        success_once, success_at_end, finish_step, regressions, simulator_once, simulator_at_end, unanswered: see
            `rlvla.experience.Sample`.
        failure: why the policy had no actions, so that the episode failed; "" if it had.
    """

    suite: str
    task_id: int
    init_state_id: int
    seed: int
    uid: str
    success_once: bool
    success_at_end: bool
    finish_step: int
    regressions: int
    simulator_once: bool | None = None
    simulator_at_end: bool | None = None
    unanswered: int = 0
    failure: str = ""

    @classmethod
    def of(cls, sample: Sample) -> FinishedEpisode:
        """From a sample whose rewards may still be incomplete."""
        return cls(**{field.name: getattr(sample, field.name) for field in fields(cls) if field.name != "failure"})


class Phase(enum.Enum):
    """State of an episode."""

    PENDING = "pending"
    CREATING = "creating"
    RESETTING = "resetting"
    READY = "waiting for the policy"
    STEPPING = "stepping"
    JUDGING = "waiting for a judge"
    COMPLETED = "completed"
    FAILED = "failed"


class Episode:
    """Recorder and state machine of one episode.

    Args:
        request: the episode to play.
        task: its task.
        rewards: the reward plan.
        policy: preprocesses observations.
        state_input: adds the state of a reward machine to observations; None disables it.
        instructions: replaces the task's instruction at each decision; None disables it.
        keep_observed: keep the images as rendered even if the policy sees preprocessed ones; always on if a reward
            source needs the images of finished episodes.
        policy_proprio: see `RolloutEngine`.
        interventions: when the scripted expert takes over; None: never.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        task: TaskSpec,
        rewards: RewardPlan,
        policy: RolloutPolicy,
        state_input: StateInput | None = None,
        instructions: InstructionSource | None = None,
        *,
        keep_observed: bool = False,
        policy_proprio: int | None = None,
        interventions: InterventionRule | None = None,
    ):
        self.request = request
        self.interventions = None if interventions is None else interventions.begin(task, request.seed)
        self.phase = Phase.PENDING
        self._task, self._plan = task, rewards
        self._rewards: EpisodeRewards | None = None
        self._state = None if state_input is None else state_input.begin(task)
        self._sub_instructions = None if instructions is None else instructions.begin(task)
        self._success = None if rewards.success is None else rewards.success.begin(task)
        self._queries: list[Future[Any]] = []  # of judges, about the pending chunk
        self._pending_chunk: ChunkResult | None = None
        self._success_decided = False  # for the pending chunk
        self._instruction = ""
        self._other_instruction: str | None = None
        self._rng = derive_rng(request.seed, "sampling")
        self._policy, self._keep_observed = policy, keep_observed or request.record_frames
        self._as_rendered = True  # the policy sees the rendered images
        self._observations: list[Observation] = []  # prepared for the policy
        self._observed_images: list[np.ndarray] = []
        self._observed_proprio: list[np.ndarray] = []
        self._policy_proprio, self._critic_state = policy_proprio, list[np.ndarray]()
        self._actions: list[np.ndarray] = []
        self._log_probs: list[np.ndarray] = []
        self._decision_traces: list[dict[str, np.ndarray]] = []
        self._versions: list[int] = []
        self._executed: list[int] = []
        self._step_actions: list[np.ndarray] = []
        self._frames: list[np.ndarray] = []
        self._step_events: list[tuple[frozenset[str], bool]] = []
        self._success_once = False
        self._success_now = False
        self._regressions = 0
        self._last: ChunkResult | None = None
        self._terminated = self._truncated = False

    @property
    def observation(self) -> Observation:
        """The latest observation, as the policy sees it."""
        return self._observations[-1]

    @property
    def chunk_length(self) -> int:
        """A, the number of actions in the current chunk."""
        return len(self._actions[-1])

    @property
    def steps(self) -> int:
        """Environment steps executed so far."""
        return sum(self._executed)

    def noise(self) -> np.ndarray:
        """Random numbers for the next decision from the episode's generator, see `PolicySpec.draw`."""
        return self._policy.spec.draw(self._rng)

    def on_observation(self, observation: Observation) -> None:
        """The environment was reset."""
        observation = self._for_policy(observation)
        self._instruction = observation.instruction
        others = [text for text in self.request.other_instructions if text != observation.instruction]
        self._other_instruction = others[0] if others else None
        self._store(observation)
        start = EpisodeStart(observation, self.request.init_state_id, self.request.seed)
        self._rewards = self._plan.begin(self._task, start)
        self.phase = Phase.READY

    def _for_policy(self, observation: Observation) -> Observation:
        return observation if self._policy_proprio is None else observation.for_policy(self._policy_proprio)

    def _store(self, observation: Observation) -> None:
        """Preprocess an observation and store it."""
        if self._other_instruction is not None:
            observation = replace(observation, instruction=self._other_instruction)
        elif self._sub_instructions is not None:
            observation = self._sub_instructions.observe(observation)
        if self._state is not None:
            observation = self._state.observe(observation)
        rendered = np.full_like(observation.images, _GRAY) if self.request.blind else observation.images
        images, proprio = self._policy.prepare(rendered, observation.proprio)
        if images is not observation.images:
            self._as_rendered = False
            if self._keep_observed or self._plan.looks_at_images:
                self._observed_images.append(observation.images)
        if observation.proprio is not None:
            self._observed_proprio.append(observation.proprio)
        if observation.privileged is not None:
            elapsed = [self.steps / self._task.max_steps]
            machine = () if observation.proprio is None else observation.proprio[self._policy_proprio :]
            self._critic_state.append(np.concatenate([elapsed, machine, observation.privileged], dtype=np.float32))
        self._observations.append(replace(observation, images=images, proprio=proprio))

    def on_decision(
        self, actions: np.ndarray, log_probs: np.ndarray, trace: dict[str, np.ndarray], version: int | None = None
    ) -> None:
        """Record actions [A, D], their log-probs [K], trace and weight version, see `Decision`."""
        if version is not None:
            self._versions.append(version)
        self._actions.append(actions)
        self._log_probs.append(log_probs)
        self._decision_traces.append(trace)
        self.phase = Phase.STEPPING

    def on_chunk(self, result: ChunkResult) -> None:
        """Process an executed chunk; if judges are queried about it, `on_answers` completes this."""
        assert self._rewards is not None
        result = replace(result, observation=self._for_policy(result.observation))
        success_queries = [] if self._success is None else self._success.look(result)
        self._queries = [*success_queries, *self._rewards.look(result)]
        self._pending_chunk, self._success_decided = result, self._success is None
        self.phase = Phase.JUDGING
        if not self._queries:
            self.on_answers()

    @property
    def answers(self) -> list[Future[Any]]:
        """Pending answers of judges."""
        return [answer for answer in self._queries if not answer.done()]

    def on_answers(self) -> None:
        """Complete the chunk after all judges have answered; success may lead to further queries about its end."""
        result = self._pending_chunk
        assert self._rewards is not None and result is not None
        if self._success is not None and not self._success_decided:
            self._pending_chunk = result = self._success.decide(result)
            self._success_decided = True
            self._queries = self._rewards.query_final_frame(result) if result.success_at_end else []
            if self.answers:
                return
        self._rewards.score_chunk(result)
        self._executed.append(result.steps_executed)
        self._count_success(result.successes[: result.steps_executed])
        if result.step_actions is not None:
            self._step_actions.append(result.step_actions)
        elif self.interventions is not None:
            self._step_actions.append(self._actions[-1][: result.steps_executed])
        if self.interventions is not None:
            self.interventions.follow(result)
        if result.frames is not None:
            self._frames.append(result.frames)
        if result.frames is not None or self._state is not None:
            self._step_events += [
                (result.events[step] if result.events else frozenset(), bool(result.successes[step]))
                for step in range(result.steps_executed)
            ]
        self._last = result
        if self._state is not None:
            self._state.follow(result)
        if self._sub_instructions is not None:
            self._sub_instructions.follow(result)
        self._store(result.observation)
        # A reward source may end an episode at the end of a chunk. Failure takes precedence over truncation: the value
        # after it is 0 even if the step limit is reached in the same chunk.
        self._terminated = result.terminated or self._rewards.failed
        self._truncated = not self._terminated and (result.truncated or self._rewards.stalled)
        self.phase = Phase.COMPLETED if self._terminated or self._truncated else Phase.READY
        if self.phase is Phase.COMPLETED:
            self._rewards.end(terminated=self._terminated, truncated=self._truncated)

    def failed_by_policy(self, reason: str) -> FinishedEpisode:
        """End the episode as a failure, because the policy has no actions."""
        request, steps = self.request, self.steps
        self.fail()
        return FinishedEpisode(
            request.suite,
            request.task_id,
            request.init_state_id,
            request.seed,
            request.uid,
            success_once=self._success_once,
            success_at_end=False,
            finish_step=steps,
            regressions=self._regressions,
            failure=reason,
        )

    def fail(self) -> None:
        """Discard this attempt after a failure of the environment."""
        self.phase = Phase.FAILED
        if self._rewards is not None:
            self._rewards.release()

    def final_sample(self, sample: Sample, judged: dict[str, Any]) -> Sample:
        """The sample with all rewards; releases the reward sources, so call it once.

        Args:
            sample: result of `to_sample`; not modified.
            judged: rewards from sample sources, see `EpisodeRewards.finalize_rewards`.
        """
        assert self._rewards is not None
        paid = self._rewards.finalize_rewards(judged)
        self._rewards.release()
        observed = sample.observed_images if self._keep_observed else None  # sample sources have read them
        return replace(sample, **_as_tensors(paid), reward_info=paid.info, observed_images=observed)

    def _count_success(self, successes: np.ndarray) -> None:
        """Update the success statistics with the predicate after each executed step."""
        history = [self._success_now, *successes.tolist()]
        self._regressions += sum(before and not after for before, after in zip(history, history[1:]))
        self._success_now = history[-1]
        self._success_once |= any(history)

    def to_sample(self) -> Sample:
        """The completed episode with the rewards available so far; RuntimeError if it is not completed."""
        if self.phase is not Phase.COMPLETED or self._last is None or self._rewards is None:
            raise RuntimeError(f"the episode is {self.phase.value}, not completed")
        actions = torch.from_numpy(np.stack(self._actions))
        decisions, last = self._observations[:-1], self._observations[-1]
        proprio = stacked_proprio(decisions)
        traces, request, success = self._decision_traces, self.request, self._success
        simulator = None if success is None else success.simulator
        return Sample(
            images=torch.from_numpy(np.stack([o.images for o in decisions])),
            proprio=None if proprio is None else torch.from_numpy(proprio),
            instruction=self._instruction,
            actions=actions,
            executed=torch.arange(actions.shape[1])[None] < torch.tensor(self._executed)[:, None],
            trace={name: torch.from_numpy(np.stack([trace[name] for trace in traces])) for name in traces[0]},
            log_probs=torch.from_numpy(np.stack(self._log_probs)),
            step_actions=torch.from_numpy(np.concatenate(self._step_actions)) if self._step_actions else None,
            **_as_tensors(self._rewards.so_far()),
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
            observed_images=_stacked(self._observed_images),
            observed_proprio=_stacked(self._observed_proprio),
            critic_state=_stacked(self._critic_state),
            images_as_rendered=self._as_rendered,
            regressions=self._regressions,
            simulator_once=None if simulator is None else simulator.once,
            simulator_at_end=None if simulator is None else simulator.at_end,
            unanswered=0 if success is None else success.unanswered,
            frames=np.concatenate(self._frames) if self._frames else None,
            step_events=self._step_events or None,
            prompted_instructions=[o.instruction for o in self._observations]
            if self._state or self._sub_instructions
            else None,
            state_width=0 if self._state is None else self._state.width,
            images_flipped_vertically=self._task.images_flipped_vertically,
            versions=torch.tensor(self._versions) if self._versions else None,
            interventions=None if self.interventions is None else torch.tensor(self.interventions.flags),
        )


def stacked_proprio(observations: Sequence[Observation]) -> np.ndarray | None:
    """Proprioception [B, P] of observations; None if they have none."""
    states = [o.proprio for o in observations if o.proprio is not None]
    return np.stack(states) if states else None


def _stacked(arrays: list[np.ndarray]) -> torch.Tensor | None:
    return torch.from_numpy(np.stack(arrays)) if arrays else None


def _as_tensors(paid: PaidRewards) -> dict[str, Any]:
    """The fields `rewards`, `reward_components` and `scores` of a sample."""
    components = {name: torch.from_numpy(grid) for name, grid in paid.components.items()}
    scores = {name: torch.from_numpy(values) for name, values in paid.scores.items()}
    return {"rewards": torch.from_numpy(paid.total), "reward_components": components, "scores": scores}

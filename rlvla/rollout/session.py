"""A single rollout: assigns episodes to slots, batches decisions, and retries failed episodes."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.envs.workers.answer_checks import AnswerChecker, BadAnswerError
from rlvla.envs.workers.messages import EnvSpec, Make, Reset, SlotCommand, StepChunk, StepExpert
from rlvla.envs.workers.pool import EnvWorkerError, Result
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.experience import Sample
from rlvla.models.policy import RolloutPolicy
from rlvla.rewards import RewardPlan, StateInput
from rlvla.rewards.instructions import InstructionSource
from rlvla.rollout.config import RolloutConfig
from rlvla.rollout.episode import Episode, EpisodeRequest, FinishedEpisode, Phase, stacked_proprio
from rlvla.rollout.interventions import InterventionRule
from rlvla.rollout.stats import DroppedEpisode, RolloutStats, TooManyDroppedError
from rlvla.utils.errors import ConfigError, RunEnded

log = logging.getLogger(__name__)

Task = tuple[str, int]  # suite, task id

_FOREVER_S = 1e6  # finite, as the OS requires
_JUDGE_POLL_S = 0.01  # while workers simulate
_CANCEL_POLL_S = 0.1


class RolloutCancelledError(Exception):
    """The caller of a rollout no longer wants it."""


class Batcher:
    """Collects waiting episodes until a batch is due.

    A batch is due when it reaches the target size, when its oldest episode has waited for `max_wait_s`, or when no
    other episode could still join it.

    Args:
        max_batch: maximum batch size.
        max_wait_s: maximum seconds an episode waits for its batch to reach the target size.
        target: batch size that is due at once; default `max_batch`.
    """

    def __init__(self, max_batch: int, max_wait_s: float, target: int | None = None):
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._target = max_batch if target is None else target
        self._waiting: deque[tuple[int, float]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, slot: int, now: float) -> None:
        """Queue the episode of a slot; `now` is in seconds of a monotonic clock."""
        self._waiting.append((slot, now))

    def take(self, now: float, others: int) -> list[int]:
        """Slots of the batch that is due, longest waiting first; empty if none is due.

        Args:
            now: current time, same clock as in `add`.
            others: number of running episodes that are not waiting.
        """
        if not self._waiting:
            return []
        full = len(self._waiting) >= self._target
        if not (full or others == 0 or now - self._waiting[0][1] >= self._max_wait_s):
            return []
        return [self._waiting.popleft()[0] for _ in range(min(self._max_batch, len(self._waiting)))]

    def time_until_due(self, now: float) -> float | None:
        """Upper bound on the seconds until a batch is due; None if no episode is waiting."""
        return max(0.0, self._waiting[0][1] + self._max_wait_s - now) if self._waiting else None


class PendingEpisodes:
    """Request indices that have not started, queued by task.

    Building an environment takes seconds, a reset a fraction of one. A slot therefore gets an episode of the task it
    played last, else of a task whose environment it has kept, else of the task with the most episodes left. The order
    does not affect results, because the outcome of an episode depends on its request alone.

    Args:
        tasks: task of each request.
    """

    def __init__(self, tasks: Sequence[Task]):
        self._tasks = list(tasks)
        self._queues: OrderedDict[Task, deque[int]] = OrderedDict()
        for index, task in enumerate(tasks):
            self._queues.setdefault(task, deque()).append(index)

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def take(self, kept: Sequence[Task] = ()) -> int:
        """Next request for a slot with environments of the tasks `kept`, the one it played last first."""
        kept_queues = [queue for task in kept if (queue := self._queues.get(task))]
        if kept_queues and kept_queues[0] is self._queues.get(kept[0]):
            return kept_queues[0].popleft()
        return max(kept_queues or self._queues.values(), key=len).popleft()

    def put_back(self, index: int) -> None:
        """Return a request to the front of its task's queue."""
        self._queues[self._tasks[index]].appendleft(index)


@dataclass
class _Running:
    """An episode in a slot.

    Attributes:
        index: index of its request.
        env: its environment.
        episode: the data recorded so far.
        checker: validates the worker's answers.
        since: time at which the last command was submitted.
    """

    index: int
    env: EnvSpec
    episode: Episode
    checker: AnswerChecker
    since: float = 0.0


class RolloutSession:
    """Plays the episodes of one call of `RolloutEngine.run`; see there for the arguments."""

    def __init__(
        self,
        pool: WatchedPool,
        requests: Sequence[EpisodeRequest],
        *,
        tasks: Mapping[Task, TaskSpec],
        env_kwargs: dict[str, Any],
        plan: RewardPlan,
        config: RolloutConfig,
        policy: RolloutPolicy,
        state_input: StateInput | None = None,
        instructions: InstructionSource | None = None,
        keep_observed: bool = False,
        policy_proprio: int | None = None,
        interventions: InterventionRule | None = None,
        temperature: float,
        greedy: bool,
        on_episode: Callable[[FinishedEpisode], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        kept: int = 0,
    ):
        self._pool, self._requests, self._tasks = pool, requests, tasks
        self._env_kwargs, self._plan = env_kwargs, plan
        self._config, self._policy = config, policy
        self._state_input, self._instructions = state_input, instructions
        self._keep_observed, self._temperature, self._greedy = keep_observed, temperature, greedy
        self._policy_proprio, self._interventions = policy_proprio, interventions
        self._on_episode, self._cancelled, self._total = on_episode, cancelled, len(requests) + kept
        self._pending = PendingEpisodes([(request.suite, request.task_id) for request in requests])
        self._running: dict[int, _Running] = {}  # by slot of the pool
        self._checkers: dict[Task, AnswerChecker] = {}  # one per task, whose images must have one shape
        self._judging: list[int] = []  # slots whose episodes wait for a judge
        self._outbox: list[SlotCommand] = []  # commands for the slots of a worker are sent as one message
        self._largest_batch = config.rollout_max_batch or pool.num_slots
        if config.deterministic_rollout:
            self._batcher = Batcher(pool.num_slots, _FOREVER_S)
        else:
            # One half of the slots simulates while the policy answers the other.
            target = min(self._largest_batch, max(1, pool.num_slots // 2))
            self._batcher = Batcher(self._largest_batch, config.rollout_max_wait_ms / 1000.0, target)
        self._attempts = [0] * len(requests)
        self._samples: list[Sample | None] = [None] * len(requests)
        # (request index, episode, sample without late rewards), in order of completion
        self._finished: list[tuple[int, Episode, Sample]] = []
        self.stats = RolloutStats()

    def play(self) -> list[Sample]:
        """Play all episodes and return the finished ones in the order of their requests."""
        start = time.perf_counter()
        try:
            while len(self._pending) or self._running:
                if self._cancelled is not None and self._cancelled():
                    raise RolloutCancelledError("the rollout was cancelled")
                self._advance()
        finally:
            self._plan.rollout_over()  # before other reward models score the episodes
        played = time.perf_counter()
        self.stats.wall_s = played - start
        for (index, episode, sample), judged in zip(self._finished, self._plan.collect(len(self._finished))):
            self._samples[index] = episode.final_sample(sample, judged)
        self.stats.rewards_s = time.perf_counter() - played
        return [sample for sample in self._samples if sample is not None]

    def _advance(self) -> None:
        """Start episodes in free slots, decide for the batch that is due, and process the next answers."""
        # In deterministic mode, episodes start only when all running ones wait, independent of timing.
        may_start = not self._config.deterministic_rollout or len(self._running) == len(self._batcher)
        if len(self._pending) and may_start:
            self._start_episodes()
        slots = self._batcher.take(time.perf_counter(), len(self._running) - len(self._batcher))
        # Batch size and row position can change the last bits of log-probs.
        slots.sort(key=lambda slot: self._running[slot].index)
        for first in range(0, len(slots), self._largest_batch):
            self._decide(slots[first : first + self._largest_batch])
        self._process_answers()

    def _start_episodes(self) -> None:
        for slot in self._pool.idle():
            if not len(self._pending):
                break
            if slot in self._running or not self._pool.between_episodes(slot, self._running):
                continue
            current = self._pool.holds(slot)
            index = self._pending.take([(env.suite, env.task_id) for env in self._pool.keeps(slot)])
            request = self._requests[index]
            key = request.suite, request.task_id
            task, env = self._tasks[key], EnvSpec(*key, self._env_kwargs)
            if key not in self._checkers:
                self._checkers[key] = AnswerChecker(task, self._env_kwargs)
            episode = Episode(
                request,
                task,
                self._plan,
                self._policy,
                self._state_input,
                self._instructions,
                keep_observed=self._keep_observed,
                policy_proprio=self._policy_proprio,
                interventions=self._interventions,
            )
            self._running[slot] = running = _Running(index, env, episode, self._checkers[key])
            if current == env:
                self._reset(slot, running)
            else:  # separate from the reset, because building has its own time limit
                episode.phase = Phase.CREATING
                self._queue(slot, running, Make(env))
        self._send()

    def _reset(self, slot: int, running: _Running) -> None:
        request = running.episode.request
        running.episode.phase = Phase.RESETTING
        self._queue(slot, running, Reset(running.env, request.init_state_id, request.seed))

    def _queue(self, slot: int, running: _Running, command: Make | Reset | StepChunk | StepExpert) -> None:
        """Queue a command for the next `_send`."""
        running.since = time.perf_counter()
        self._outbox.append((slot, command))

    def _send(self) -> None:
        self._pool.submit_all(self._outbox)
        self._outbox.clear()

    def _decide(self, slots: Sequence[int]) -> None:
        start = time.perf_counter()
        episodes = [self._running[slot].episode for slot in slots]
        observations = [episode.observation for episode in episodes]
        spec = self._policy.spec
        draws = not self._greedy or spec.greedy_noise
        decision = self._policy.act(
            np.stack([o.images for o in observations]),
            stacked_proprio(observations),
            [o.instruction for o in observations],
            noise=np.stack([episode.noise() for episode in episodes]) if draws else None,
            temperature=self._temperature,
            **({"greedy": self._greedy} if spec.greedy_noise else {}),
        )
        self.stats.policy_s += time.perf_counter() - start
        self.stats.policy_calls += 1
        self.stats.decisions += len(slots)
        for row, (slot, episode) in enumerate(zip(slots, episodes)):
            actions, request = decision.actions[row], episode.request
            if row in decision.failures:
                self._fail_by_policy(slot, decision.failures[row])
                continue
            if not np.isfinite(actions).all():
                raise RunEnded(
                    f"the policy's actions hold NaN or infinity ({request.suite}, task {request.task_id}, initial "
                    f"state {request.init_state_id}): its weights or dataset statistics are damaged; use an earlier "
                    "checkpoint"
                )
            trace = {name: values[row] for name, values in decision.trace.items()}
            episode.on_decision(actions, decision.log_probs[row], trace, decision.version)
            command: StepChunk | StepExpert = StepChunk(actions, request.record_frames)
            if episode.interventions is not None:
                command = episode.interventions.command(len(actions)) or command
            self._queue(slot, self._running[slot], command)
        self._send()

    def _process_answers(self) -> None:
        """Process answers of workers and judges; waits for the first one, at most until a batch is due."""
        now = time.perf_counter()
        until_due = self._batcher.time_until_due(now)
        if self._cancelled is not None:
            until_due = _CANCEL_POLL_S if until_due is None else min(until_due, _CANCEL_POLL_S)
        results = self._wait(until_due)
        self.stats.waiting_s += time.perf_counter() - now
        for slot, result in results:
            running = self._running[slot]
            took = time.perf_counter() - running.since
            self.stats.env_busy_s += took
            self.stats.building_s += took if running.episode.phase is Phase.CREATING else 0.0
            if isinstance(result, ConfigError):
                raise result
            error = result if isinstance(result, EnvWorkerError) else self._accept(slot, running, result)
            if error is not None:
                self._fail(slot, running, error)
            else:
                self._dispatch(slot, running)
        self._poll_judges()
        self._send()

    @property
    def _num_stepping(self) -> int:
        """Number of episodes that wait for a worker."""
        return len(self._running) - len(self._batcher) - len(self._judging)

    def _wait(self, until_due: float | None) -> list[tuple[int, Result]]:
        """Wait for workers or judges, at most until a batch is due."""
        stepping = self._num_stepping
        if not self._judging:
            return self._pool.wait(until_due if stepping else 0.0 if self._running else None)
        if stepping:
            return self._pool.wait(_JUDGE_POLL_S if until_due is None else min(until_due, _JUDGE_POLL_S))
        judgements = [answer for slot in self._judging for answer in self._running[slot].episode.answers]
        futures.wait(judgements, until_due, futures.FIRST_COMPLETED)
        return self._pool.wait(0.0)

    def _dispatch(self, slot: int, running: _Running) -> None:
        """Queue an episode for the policy or a judge, or finish it, by its phase."""
        if running.episode.phase is Phase.READY:
            self._batcher.add(slot, time.perf_counter())
        elif running.episode.phase is Phase.JUDGING:
            self._judging.append(slot)
        elif running.episode.phase is Phase.COMPLETED:
            self._finish(slot, running)

    def _poll_judges(self) -> None:
        """Continue episodes whose judges have answered."""
        if not self._judging:
            return
        if not self._num_stepping or not self._config.deterministic_rollout:
            self._plan.judge_waiting()
        waiting, self._judging = self._judging, []
        for slot in waiting:
            running = self._running[slot]
            if not running.episode.answers:
                running.episode.on_answers()
            self._dispatch(slot, running)

    def _accept(self, slot: int, running: _Running, result: Result) -> EnvWorkerError | None:
        """Pass an answer to its episode; one that breaks the contract counts as an environment failure."""
        episode = running.episode
        try:
            if episode.phase is Phase.CREATING:
                running.checker.made(result)
                self._reset(slot, running)
            elif episode.phase is Phase.RESETTING:
                running.checker.observation(result)
                episode.on_observation(result)  # type: ignore[arg-type]
            else:
                running.checker.chunk(
                    result,
                    episode.chunk_length,
                    steps_before=episode.steps,
                    record_frames=episode.request.record_frames,
                    by_expert=episode.interventions is not None and episode.interventions.acting,
                )
                episode.on_chunk(result)  # type: ignore[arg-type]
        except BadAnswerError as error:  # do not reuse a worker that gave an invalid answer
            return self._pool.reject(slot, error)
        return None

    def _finish(self, slot: int, running: _Running) -> None:
        del self._running[slot]
        sample = running.episode.to_sample()
        self._finished.append((running.index, running.episode, sample))
        self._plan.submit(sample)
        self.stats.episodes += 1
        self.stats.env_steps += sample.finish_step
        if self._on_episode:
            self._on_episode(FinishedEpisode.of(sample))

    def _fail_by_policy(self, slot: int, reason: str) -> None:
        """Count an episode as failed, because the policy has no actions for it."""
        failed = self._running.pop(slot).episode.failed_by_policy(reason)
        log.warning("task %d, initial state %d fails: %s", failed.task_id, failed.init_state_id, reason)
        self.stats.failed.append(failed)
        if self._on_episode:
            self._on_episode(failed)

    def _fail(self, slot: int, running: _Running, error: EnvWorkerError) -> None:
        """Retry the episode or drop it; a failure caused by another slot does not count as an attempt."""
        del self._running[slot]
        running.episode.fail()
        self.stats.faults[error.kind] += 1
        retries = self._config.max_env_retries
        if error.collateral:
            log.warning("retrying an episode whose worker failed in another episode: %s", error)
        else:
            self._attempts[running.index] += 1
            log.warning(
                "attempt %d of %d to play an episode failed: %s", self._attempts[running.index], retries + 1, error
            )
        if error.collateral or self._attempts[running.index] <= retries:
            self.stats.retries += 1
            self._pending.put_back(running.index)
            return
        self.stats.dropped.append(DroppedEpisode(running.episode.request, error))
        limit = self._config.max_dropped_fraction
        if len(self.stats.dropped) > limit * self._total:
            raise TooManyDroppedError(self.stats.dropped, self._total, limit)

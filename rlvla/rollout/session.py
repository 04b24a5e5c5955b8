"""A single rollout: assigns episodes to slots, batches decisions, and retries failed episodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.envs.workers.answer_checks import AnswerChecker, BadAnswerError
from rlvla.envs.workers.messages import EnvSpec, Make, Reset, SlotCommand, StepChunk
from rlvla.envs.workers.pool import EnvWorkerError, Result
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.experience import Sample
from rlvla.models.policy import RolloutPolicy
from rlvla.rewards import RewardPlan, StateInput
from rlvla.rollout.batcher import Batcher
from rlvla.rollout.config import RolloutConfig
from rlvla.rollout.episode import Episode, EpisodeRequest, FinishedEpisode, Phase
from rlvla.rollout.pending import PendingEpisodes
from rlvla.rollout.stats import DroppedEpisode, RolloutStats, TooManyDroppedError
from rlvla.utils.errors import ConfigError, RunEnded

log = logging.getLogger(__name__)

_FOREVER_S = 1e6  # finite, as the OS requires
_JUDGES_EVERY_S = 0.01  # between looks at the answers of judges while workers simulate
_CANCELLED_EVERY_S = 0.1  # between looks at whether the rollout is cancelled


class RolloutCancelledError(Exception):
    """The caller of a rollout no longer wants it."""


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
        tasks: Mapping[tuple[str, int], TaskSpec],
        env_kwargs: dict[str, Any],
        plan: RewardPlan,
        config: RolloutConfig,
        policy: RolloutPolicy,
        state_input: StateInput | None = None,
        keep_observed: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ):
        self._pool, self._requests, self._tasks = pool, requests, tasks
        self._cancelled = cancelled
        self._env_kwargs, self._plan = env_kwargs, plan
        self._config, self._policy, self._state_input = config, policy, state_input
        self._keep_observed = keep_observed
        self._pending = PendingEpisodes([(request.suite, request.task_id) for request in requests])
        self._running: dict[int, _Running] = {}  # by slot of the pool
        self._checkers: dict[tuple[str, int], AnswerChecker] = {}
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

    def play(
        self, *, temperature: float, greedy: bool, on_episode: Callable[[FinishedEpisode], None] | None = None
    ) -> list[Sample]:
        """Play all episodes and return the finished ones in the order of their requests."""
        start = time.perf_counter()
        try:
            while len(self._pending) or self._running:
                if self._cancelled is not None and self._cancelled():
                    raise RolloutCancelledError("the rollout was cancelled")
                self._advance(temperature, greedy, on_episode)
        finally:
            self._plan.rollout_over()  # before other reward models score the episodes
        played = time.perf_counter()
        self.stats.wall_s = played - start
        for (index, episode, sample), judged in zip(self._finished, self._plan.collect(len(self._finished))):
            self._samples[index] = episode.final_sample(sample, judged)
        self.stats.rewards_s = time.perf_counter() - played
        return [sample for sample in self._samples if sample is not None]

    def _advance(self, temperature: float, greedy: bool, on_episode: Callable[[FinishedEpisode], None] | None) -> None:
        """Start episodes in free slots, answer those whose batch is due, and wait for what comes next."""
        if len(self._pending) and self._may_start():
            self._start_episodes()
        slots = self._batcher.take(time.perf_counter(), len(self._running) - len(self._batcher))
        # Batch size and row position can change the last bits of log-probs.
        slots.sort(key=lambda slot: self._running[slot].index)
        for first in range(0, len(slots), self._largest_batch):
            self._decide(slots[first : first + self._largest_batch], temperature, greedy)
        self._listen(on_episode)

    def _may_start(self) -> bool:
        """In deterministic mode, start episodes only when all running ones wait, independent of timing."""
        return not self._config.deterministic_rollout or len(self._running) == len(self._batcher)

    def _start_episodes(self) -> None:
        for slot in self._pool.idle():
            if not len(self._pending):
                break
            if slot in self._running or not self._pool.between_episodes(slot, self._running):
                continue
            current = self._pool.holds(slot)
            index = self._pending.take([(env.suite, env.task_id) for env in self._pool.keeps(slot)])
            request = self._requests[index]
            task = self._tasks[request.suite, request.task_id]
            env = EnvSpec(request.suite, request.task_id, self._env_kwargs)
            episode = Episode(
                request, task, self._plan, self._policy, self._state_input, keep_observed=self._keep_observed
            )
            self._running[slot] = running = _Running(index, env, episode, self._checker(task))
            if current == env:
                self._reset(slot, running)
            else:  # separate from the reset, because building has its own time limit
                running.episode.phase = Phase.CREATING
                self._command(slot, running, Make(env))
        self._send()

    def _checker(self, task: TaskSpec) -> AnswerChecker:
        """One for all episodes of a task, whose images must have one shape."""
        key = (task.suite, task.task_id)
        if key not in self._checkers:
            self._checkers[key] = AnswerChecker(task, self._env_kwargs)
        return self._checkers[key]

    def _reset(self, slot: int, running: _Running) -> None:
        request = running.episode.request
        running.episode.phase = Phase.RESETTING
        self._command(slot, running, Reset(running.env, request.init_state_id, request.seed))

    def _command(self, slot: int, running: _Running, command: Make | Reset | StepChunk) -> None:
        """Queue a command for the next `_send`."""
        running.since = time.perf_counter()
        self._outbox.append((slot, command))

    def _send(self) -> None:
        self._pool.submit_all(self._outbox)
        self._outbox.clear()

    def _decide(self, slots: Sequence[int], temperature: float, greedy: bool) -> None:
        start = time.perf_counter()
        episodes = [self._running[slot].episode for slot in slots]
        observations = [episode.observation for episode in episodes]
        spec = self._policy.spec
        noise = None if greedy and not spec.greedy_noise else np.stack([episode.noise() for episode in episodes])
        proprio = None if observations[0].proprio is None else np.stack([o.proprio for o in observations])
        decision = self._policy.act(
            np.stack([o.images for o in observations]),
            proprio,
            [o.instruction for o in observations],
            noise=noise,
            temperature=temperature,
            **({"greedy": greedy} if spec.greedy_noise else {}),
        )
        self.stats.policy_s += time.perf_counter() - start
        self.stats.policy_calls += 1
        self.stats.decisions += len(slots)
        if not np.isfinite(decision.actions).all():
            row = next(row for row, actions in enumerate(decision.actions) if not np.isfinite(actions).all())
            request = episodes[row].request
            raise RunEnded(
                f"the policy's actions hold NaN or infinity ({request.suite}, task {request.task_id}, initial state "
                f"{request.init_state_id}): its weights or dataset statistics are damaged; use an earlier checkpoint"
            )
        for row, (slot, episode) in enumerate(zip(slots, episodes)):
            trace = {name: values[row] for name, values in decision.trace.items()}
            episode.on_decision(decision.actions[row], decision.log_probs[row], trace, decision.version)
            chunk = StepChunk(decision.actions[row], episode.request.record_frames)
            self._command(slot, self._running[slot], chunk)
        self._send()

    def _listen(self, on_episode: Callable[[FinishedEpisode], None] | None) -> None:
        """Process answers; waits for the first one, but not longer than until a batch is due."""
        now = time.perf_counter()
        until_due = self._batcher.time_until_due(now)
        if self._cancelled is not None:
            until_due = _CANCELLED_EVERY_S if until_due is None else min(until_due, _CANCELLED_EVERY_S)
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
                self._go_on(slot, running, on_episode)
        self._hear_judges(on_episode)
        self._send()

    def _wait(self, until_due: float | None) -> list[tuple[int, Result]]:
        """Wait for workers or judges, but not longer than until a batch is due."""
        judged = [answer for slot in self._judging for answer in self._running[slot].episode.answers]
        stepping = len(self._running) - len(self._batcher) - len(self._judging)
        if not self._judging:
            return self._pool.wait(until_due if stepping else 0.0 if self._running else None)
        if stepping:
            return self._pool.wait(_JUDGES_EVERY_S if until_due is None else min(until_due, _JUDGES_EVERY_S))
        futures.wait(judged, until_due, futures.FIRST_COMPLETED)
        return self._pool.wait(0.0)

    def _go_on(self, slot: int, running: _Running, on_episode: Callable[[FinishedEpisode], None] | None) -> None:
        """Do what the phase of an episode asks for."""
        if running.episode.phase is Phase.READY:
            self._batcher.add(slot, time.perf_counter())
        elif running.episode.phase is Phase.JUDGING:
            self._judging.append(slot)
        elif running.episode.phase is Phase.COMPLETED:
            self._finish(slot, running, on_episode)

    def _hear_judges(self, on_episode: Callable[[FinishedEpisode], None] | None) -> None:
        """Let episodes go on whose judges have answered."""
        if not self._judging:
            return
        stepping = len(self._running) - len(self._batcher) - len(self._judging)
        if not stepping or not self._config.deterministic_rollout:
            self._plan.judge_waiting()
        waiting, self._judging = self._judging, []
        for slot in waiting:
            running = self._running[slot]
            if not running.episode.answers:
                running.episode.on_answers()
            self._go_on(slot, running, on_episode)

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
                )
                episode.on_chunk(result)  # type: ignore[arg-type]
        except BadAnswerError as error:  # do not reuse a worker that gave an invalid answer
            return self._pool.reject(slot, error)
        return None

    def _finish(self, slot: int, running: _Running, on_episode: Callable[[FinishedEpisode], None] | None) -> None:
        del self._running[slot]
        sample = running.episode.to_sample()
        self._finished.append((running.index, running.episode, sample))
        self._plan.submit(sample)
        self.stats.episodes += 1
        self.stats.env_steps += sample.finish_step
        if on_episode:
            on_episode(FinishedEpisode.of(sample))

    def _fail(self, slot: int, running: _Running, error: EnvWorkerError) -> None:
        """Retry the episode or drop it; a failure caused by another slot does not count as an attempt."""
        del self._running[slot]
        running.episode.fail()
        self.stats.faults[error.kind] += 1
        if error.collateral:
            log.warning("an episode is played again, which was lost with another one: %s", error)
            self.stats.retries += 1
            self._pending.put_back(running.index)
            return
        self._attempts[running.index] += 1
        attempt, retries = self._attempts[running.index], self._config.max_env_retries
        log.warning("attempt %d of %d to play an episode failed: %s", attempt, retries + 1, error)
        if attempt <= retries:
            self.stats.retries += 1
            self._pending.put_back(running.index)
            return
        self.stats.dropped.append(DroppedEpisode(running.episode.request, error))
        limit = self._config.max_dropped_fraction
        if len(self.stats.dropped) > limit * len(self._requests):
            raise TooManyDroppedError(self.stats.dropped, len(self._requests), limit)

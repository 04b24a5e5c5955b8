"""One rollout: its episodes, who plays them, and what happens when a worker fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.envs.base import TaskSpec
from rlvla.envs.checks import AnswerChecker, BadAnswerError
from rlvla.envs.messages import EnvSpec, Make, Reset, StepChunk
from rlvla.envs.pool import EnvWorkerError, Result
from rlvla.envs.watchdog import WatchedPool
from rlvla.experience import Sample
from rlvla.rewards import RewardPlan, StateInput
from rlvla.rollout.batcher import Batcher
from rlvla.rollout.config import RolloutConfig
from rlvla.rollout.episode import Episode, EpisodeRequest, Phase
from rlvla.rollout.pending import PendingEpisodes
from rlvla.rollout.stats import DroppedEpisode, RolloutStats, TooManyDroppedError
from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlvla.rollout.engine import RolloutPolicy

log = logging.getLogger(__name__)

# What the worker calls it.
_PHASES = {Phase.CREATING: "make", Phase.RESETTING: "reset", Phase.STEPPING: "step_chunk"}

_FOREVER_S = 1e6  # finite, for the operating system's clocks


@dataclass
class _Running:
    """An episode on a worker.

    Attributes:
        index: of its request.
        env: its environment.
        episode: what happened so far.
        checker: of the worker's answers.
        since: when the worker got its command.
    """

    index: int
    env: EnvSpec
    episode: Episode
    checker: AnswerChecker
    since: float = 0.0


class RolloutSession:
    """Plays the episodes of one call of `RolloutEngine.run`; the arguments are the engine's."""

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
    ):
        self._pool, self._requests, self._tasks = pool, requests, tasks
        self._env_kwargs, self._plan = env_kwargs, plan
        self._config, self._policy, self._state_input = config, policy, state_input
        self._pending = PendingEpisodes([(request.suite, request.task_id) for request in requests])
        self._running: dict[int, _Running] = {}
        self._largest_batch = config.rollout_max_batch or pool.num_workers
        if config.deterministic_rollout:
            self._batcher = Batcher(pool.num_workers, _FOREVER_S)
        else:
            # Half of the workers simulate while the other half is answered.
            worth = min(self._largest_batch, max(1, pool.num_workers // 2))
            self._batcher = Batcher(self._largest_batch, config.rollout_max_wait_ms / 1000.0, worth)
        self._attempts = [0] * len(requests)
        self._samples: list[Sample | None] = [None] * len(requests)
        self._finished: list[tuple[Episode, Sample]] = []  # in order of completion
        self.stats = RolloutStats()

    def play(
        self, *, temperature: float, greedy: bool, on_sample: Callable[[Sample], None] | None = None
    ) -> list[Sample]:
        """All finished episodes, in the order of their requests."""
        start = time.perf_counter()
        while len(self._pending) or self._running:
            if len(self._pending) and self._may_start():
                self._start_episodes()
            workers = self._batcher.take(time.perf_counter(), len(self._running) - len(self._batcher))
            # The size of a batch and a row's place in it may change the last bits of its log-probs.
            workers.sort(key=lambda worker: self._running[worker].index)
            for first in range(0, len(workers), self._largest_batch):
                self._decide(workers[first : first + self._largest_batch], temperature, greedy)
            self._listen(on_sample)
        played = time.perf_counter()
        self.stats.wall_s = played - start
        for (episode, sample), judged in zip(self._finished, self._plan.collect(len(self._finished))):
            episode.settle(sample, judged)
        self.stats.rewards_s = time.perf_counter() - played
        return [sample for sample in self._samples if sample is not None]

    def _may_start(self) -> bool:
        """Who gets which episode must not depend on who is free first, where batches are to be the same."""
        return not self._config.deterministic_rollout or len(self._running) == len(self._batcher)

    def _start_episodes(self) -> None:
        for worker in self._pool.idle():
            if not len(self._pending):
                return
            if worker in self._running or not self._pool.between_episodes(worker):
                continue
            held = self._pool.holds(worker)
            index = self._pending.take((held.suite, held.task_id) if held else None)
            request = self._requests[index]
            task = self._tasks[request.suite, request.task_id]
            env = EnvSpec(request.suite, request.task_id, self._env_kwargs)
            self._running[worker] = running = _Running(
                index, env, Episode(request, task, self._plan, self._state_input), AnswerChecker(task, self._env_kwargs)
            )
            if held == env:
                self._reset(worker, running)
            else:  # apart from the reset: building takes its own time, and has its own limit
                running.episode.phase = Phase.CREATING
                self._command(worker, running, Make(env))

    def _reset(self, worker: int, running: _Running) -> None:
        request = running.episode.request
        running.episode.phase = Phase.RESETTING
        self._command(worker, running, Reset(running.env, request.init_state_id, request.seed))

    def _command(self, worker: int, running: _Running, command: Make | Reset | StepChunk) -> None:
        running.since = time.perf_counter()
        self._pool.submit(worker, command)

    def _decide(self, workers: Sequence[int], temperature: float, greedy: bool) -> None:
        start = time.perf_counter()
        episodes = [self._running[worker].episode for worker in workers]
        observations = [episode.observation for episode in episodes]
        uniforms = None
        if not greedy:
            uniforms = np.stack([episode.uniforms(self._policy.tokens_per_decision) for episode in episodes])
        proprio = None if observations[0].proprio is None else np.stack([o.proprio for o in observations])
        decision = self._policy.act(
            np.stack([o.images for o in observations]),
            proprio,
            [o.instruction for o in observations],
            uniforms=uniforms,
            temperature=temperature,
        )
        self.stats.policy_s += time.perf_counter() - start
        self.stats.policy_calls += 1
        self.stats.decisions += len(workers)
        if not np.isfinite(decision.actions).all():
            raise ValueError("the policy's actions hold NaN or infinity: look at its weights and dataset statistics")
        for row, (worker, episode) in enumerate(zip(workers, episodes)):
            episode.on_decision(decision.tokens[row], decision.log_probs[row])
            chunk = StepChunk(decision.actions[row], episode.request.record_frames)
            self._command(worker, self._running[worker], chunk)

    def _listen(self, on_sample: Callable[[Sample], None] | None) -> None:
        """Wait until something arrives, but not beyond the moment at which a batch is due."""
        now = time.perf_counter()
        others = len(self._running) - len(self._batcher)
        results = self._pool.wait(self._batcher.patience(now) if others else 0.0 if self._running else None)
        self.stats.waiting_s += time.perf_counter() - now
        for worker, result in results:
            running = self._running[worker]
            self.stats.env_busy_s += time.perf_counter() - running.since
            if isinstance(result, ConfigError):
                raise result
            error = result if isinstance(result, EnvWorkerError) else self._accept(worker, running, result)
            if error is not None:
                self._fail(worker, running, error)
            elif running.episode.phase is Phase.READY:
                self._batcher.add(worker, time.perf_counter())
            elif running.episode.phase is Phase.COMPLETED:
                self._finish(worker, running, on_sample)

    def _accept(self, worker: int, running: _Running, result: Result) -> EnvWorkerError | None:
        """Hand an answer to its episode; an answer that breaks the contract is a failure of the environment."""
        episode = running.episode
        try:
            if episode.phase is Phase.CREATING:
                if result != self._tasks[running.env.suite, running.env.task_id]:
                    raise BadAnswerError(f"the environment says it is {result}")
                self._reset(worker, running)
            elif episode.phase is Phase.RESETTING:
                running.checker.observation(result)
                episode.on_observation(result)  # type: ignore[arg-type]
            else:
                running.checker.chunk(result, episode.chunk_length)
                episode.on_chunk(result)  # type: ignore[arg-type]
        except BadAnswerError as error:
            self._pool.replace(worker)  # whatever gave this answer is not asked again
            return self._bad_answer(worker, running, error)
        return None

    def _bad_answer(self, worker: int, running: _Running, error: BadAnswerError) -> EnvWorkerError:
        request = running.episode.request
        return EnvWorkerError(
            f"broke the contract of environments: {error}",
            worker_id=worker,
            phase=_PHASES[running.episode.phase],
            spec=running.env,
            init_state_id=request.init_state_id,
            seed=request.seed,
            error_type=type(error).__name__,
        )

    def _finish(self, worker: int, running: _Running, on_sample: Callable[[Sample], None] | None) -> None:
        del self._running[worker]
        self._samples[running.index] = sample = running.episode.to_sample()
        self._finished.append((running.episode, sample))
        self._plan.submit(sample)
        self.stats.episodes += 1
        self.stats.env_steps += sample.finish_step
        if on_sample:
            on_sample(sample)

    def _fail(self, worker: int, running: _Running, error: EnvWorkerError) -> None:
        """Play the episode again, or give it up."""
        del self._running[worker]
        running.episode.fail()
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

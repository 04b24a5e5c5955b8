"""Asynchronous rollouts: a thread plays episodes while the policy is trained (`--async_rollout`).

Iterations are numbered from 0. The weights that begin iteration k have version k, and episodes of iteration k may be
played by any version from k - max_staleness on. Only one thread at a time uses the environment workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from rlvla.experience import Sample
from rlvla.rollout import EpisodeRequest, RolloutEngine
from rlvla.rollout.backends import RolloutBackend
from rlvla.rollout.episode import FinishedEpisode
from rlvla.rollout.stats import RolloutStats
from rlvla.trainer.config import AsyncConfig, LoopBatchConfig
from rlvla.utils.errors import RunEnded

_POLL_S = 0.05
CPU = torch.device("cpu")
_END_S = 30.0  # late answers of judges cannot be cancelled


@dataclass
class Played:
    """Episodes that were played, statistics of their rollout, and metrics of their rewards and of the backend."""

    samples: list[Sample]
    stats: RolloutStats
    reward_metrics: dict[str, float]


@dataclass
class _Job:
    """Requested episodes and their outcome."""

    iteration: int
    requests: Sequence[EpisodeRequest]
    greedy: bool = False
    finished: list[FinishedEpisode] = field(default_factory=list)
    outcome: Future[Played] = field(default_factory=Future)


class RolloutAhead:
    """Plays episodes of this and of later iterations on a thread.

    Args:
        rollout: the rollout engine of this rank.
        policy: a backend with a copy of the weights; the caller closes it.
        config: how far rollouts may run ahead.
        batch: sampling temperature, noise and number of iterations.
        device: of the policy.
    """

    def __init__(
        self,
        rollout: RolloutEngine,
        policy: RolloutBackend,
        config: AsyncConfig,
        batch: LoopBatchConfig,
        device: torch.device = CPU,
    ):
        self._rollout, self._config, self._batch, self._device = rollout, config, batch, device
        self._policy = policy
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._ahead: dict[int, _Job] = {}  # iteration -> its first episodes, until they are taken
        self._running: _Job | None = None
        self._paused = self._closed = self._cancelled = False
        self._thread: threading.Thread | None = None

    # --------------------------------------------------------- used by the trainer
    def publish(self, policy: nn.Module, version: int) -> None:
        """Set the weights, complete on this rank, of all jobs that have not begun.

        With `partial_rollout` they make all further decisions.
        """
        if version <= self._policy.newest:
            return
        with self._changed:
            at_once = self._config.partial_rollout or (self._running is None and not self._waiting)
        # Outside of the lock: it may take long to hand over weights, and meanwhile jobs end and begin.
        if at_once:
            self._policy.load(policy, version)
        else:
            self._policy.stage(policy, version)

    def submit(self, iteration: int, requests: Sequence[EpisodeRequest]) -> None:
        """Queue the first episodes of a later iteration, played by the newest weights.

        To bound the staleness, the caller submits iteration k + max_staleness only after publishing version k.
        """
        self._ahead[iteration] = job = _Job(iteration, requests)
        self._enqueue(job, len(self._waiting))

    def holds(self, iteration: int) -> bool:
        """Whether an iteration was submitted and not yet taken."""
        return iteration in self._ahead

    def take(self, iteration: int, on_episode: Callable[[FinishedEpisode], None]) -> Played:
        """Wait for the episodes submitted for an iteration; exceptions of the rollout are raised here."""
        played = self._wait(self._ahead[iteration], on_episode)
        del self._ahead[iteration]
        return played

    def play(
        self,
        iteration: int,
        requests: Sequence[EpisodeRequest],
        on_episode: Callable[[FinishedEpisode], None],
        *,
        greedy: bool = False,
    ) -> Played:
        """Play episodes of the current iteration before all others that wait."""
        job = _Job(iteration, requests, greedy)
        self._enqueue(job, 0)
        return self._wait(job, on_episode)

    @contextmanager
    def idle(self, asked_to_stop: Callable[[], bool]) -> Iterator[None]:
        """Inside the block nothing is played ahead; running episodes are finished first, unless asked to stop."""
        with self._changed:
            self._paused = True
            while self._running is not None and self._is_alive():
                self._cancelled |= asked_to_stop()
                self._changed.wait(_POLL_S)
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread; running episodes are discarded, and nothing can be played afterwards."""
        with self._changed:
            self._closed = self._cancelled = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _enqueue(self, job: _Job, place: int) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("episodes cannot be played after the end of the run")
            self._waiting.insert(place, job)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="rollout", daemon=True)
            self._thread.start()

    def _wait(self, job: _Job, on_episode: Callable[[FinishedEpisode], None]) -> Played:
        shown, over = 0, False
        while not over:
            alive = self._is_alive()
            over = bool(wait([job.outcome], _POLL_S).done)
            for episode in job.finished[shown:]:
                on_episode(episode)
                shown += 1
            if not (alive or over):
                raise RunEnded("the rollout thread has ended; resume with --load_checkpoint")
        return job.outcome.result()

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # -------------------------------------------------------------- on the thread
    def _serve(self) -> None:
        while (job := self._next()) is not None:
            played, error = None, None
            try:
                played = self._played(job)
            except BaseException as raised:  # raised again in `_wait`
                error = raised
            with self._changed:
                self._running = None
                self._changed.notify_all()
            if played is None:
                job.outcome.set_exception(error)
            else:
                job.outcome.set_result(played)

    def _next(self) -> _Job | None:
        """Wait for episodes that may be played; None once it is closed."""
        with self._changed:
            while not self._closed and (self._paused or not self._waiting):
                self._changed.wait()
            if self._closed:
                return None
            self._running = self._waiting.pop(0)
            return self._running

    def _played(self, job: _Job) -> Played:
        if self._device.type != "cpu":  # each thread has a device of its own
            torch.get_device_module(self._device).set_device(self._device)
        self._policy.renew()
        self._rollout.rewards.start_iteration(job.iteration, self._batch.iterations)
        set_noise(self._policy, self._batch, job.iteration)
        samples = self._rollout.run(
            job.requests,
            self._policy,
            temperature=self._batch.temperature,
            greedy=job.greedy,
            on_episode=job.finished.append,
            cancelled=lambda: self._cancelled,
        )
        return Played(samples, self._rollout.stats, self._rollout.rewards.metrics() | self._policy.metrics())


def set_noise(policy: RolloutBackend, batch: LoopBatchConfig, iteration: int) -> None:
    """Set the noise level of the decisions of an iteration, counted from 0, if it is annealed."""
    if batch.flow_noise_level_end is not None:
        policy.anneal_noise(batch.flow_noise_level_end, batch.progress(iteration))

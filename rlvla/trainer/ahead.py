"""Playing episodes on a thread of their own while the policy is trained (`--async_rollout`).

Iterations are numbered from 0. The weights that begin iteration k have version k, and episodes of iteration k may be
played by any version from k - max_staleness on. Only one thread at a time uses the environment workers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlvla.experience import Sample
from rlvla.models.policy import Decision, PolicySpec, RolloutPolicy
from rlvla.rollout import EpisodeRequest, RolloutEngine
from rlvla.rollout.episode import FinishedEpisode
from rlvla.rollout.stats import RolloutStats
from rlvla.trainer.config import AsyncConfig, BatchConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.observers import Observer, Rollout

_LOOK_EVERY_S = 0.05  # at the episodes that have ended meanwhile
_NONE = -1


class PolicyCopy(RolloutPolicy):
    """A copy of a policy that plays while the policy itself is trained.

    Args:
        policy: the policy, not yet under DeepSpeed; its weights are replaced by `load`.

    Attributes:
        version: iterations of training behind the weights; -1 before the first `load`.
    """

    def __init__(self, policy: nn.Module):
        self._policy: Any = copy.deepcopy(policy).requires_grad_(False)
        self._policy.eval()
        self._lock = threading.Lock()
        self._staged: tuple[int, list[Tensor]] | None = None
        self.version = _NONE

    @property
    def spec(self) -> PolicySpec:
        """See `PolicySpec`."""
        return self._policy.spec

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """See `RolloutPolicy.prepare`."""
        return self._policy.prepare(images, proprio)

    def act(
        self, images: np.ndarray, proprio: np.ndarray | None, instructions: Sequence[str], **options: Any
    ) -> Decision:
        """See `RolloutPolicy.act`; decisions bear the version of the weights."""
        with self._lock:
            decision = self._policy.act(images, proprio, instructions, **options)
            decision.version = self.version
        return decision

    def anneal_noise(self, batch: BatchConfig, iteration: int) -> None:
        """Set the noise level of an iteration, if it is annealed."""
        if batch.flow_noise_level_end is not None:
            with self._lock:
                self._policy.anneal_noise(batch.flow_noise_level_end, batch.progress(iteration))

    def load(self, policy: nn.Module, version: int) -> None:
        """Take over weights, complete on this rank, at once."""
        with self._lock:
            self._put(_tensors(policy), version)

    def stage(self, policy: nn.Module, version: int) -> None:
        """Keep weights for the next `renew`."""
        with self._lock:
            self._staged = version, [tensor.detach().clone() for tensor in _tensors(policy)]

    def renew(self) -> None:
        """Take over what was staged since the last call, if anything."""
        with self._lock:
            if self._staged is not None:
                version, tensors = self._staged
                self._put(tensors, version)
                self._staged = None

    @torch.no_grad()
    def _put(self, tensors: Sequence[Tensor], version: int) -> None:
        for own, new in zip(_tensors(self._policy), tensors, strict=True):
            if (own.dtype, own.device) == (new.dtype, new.device):
                own.copy_(new)
            else:  # DeepSpeed has chosen them since the copy was made
                own.data = new.detach().clone()
        self.version = version

    @property
    def newest(self) -> int:
        """The newest version it has, staged or in use."""
        return self.version if self._staged is None else self._staged[0]


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, in the same order for every copy of a module."""
    return [*module.parameters(), *module.buffers()]


@dataclass
class _Job:
    """Episodes to play, and what has become of them."""

    iteration: int
    requests: Sequence[EpisodeRequest]
    greedy: bool = False
    finished: list[FinishedEpisode] = field(default_factory=list)
    outcome: Future[tuple[list[Sample], RolloutStats]] = field(default_factory=Future)


class RolloutAhead:
    """Plays episodes of this and of later iterations on a thread.

    Args:
        rollout: the rollout engine of this rank.
        policy: the policy, not yet under DeepSpeed.
        config: how far rollouts may run ahead.
        batch: sampling temperature, noise and number of iterations.
    """

    def __init__(self, rollout: RolloutEngine, policy: nn.Module, config: AsyncConfig, batch: BatchConfig):
        self._rollout, self._config, self._batch = rollout, config, batch
        self._policy = PolicyCopy(policy)
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._ahead: dict[int, _Job] = {}  # iteration -> its first episodes, until they are taken
        self._running: _Job | None = None
        self._paused = self._closed = self._cancelled = False
        self._thread: threading.Thread | None = None

    # --------------------------------------------------------- used by the trainer
    def publish(self, policy: nn.Module, version: int) -> None:
        """Offer new weights, complete on this rank, to the episodes to come; with `partial`, to all decisions."""
        with self._changed:
            if version <= self._policy.newest:
                return
            if self._running is None or self._config.partial_rollout:
                self._policy.load(policy, version)
            else:
                self._policy.stage(policy, version)
            self._changed.notify_all()

    def submit(self, iteration: int, requests: Sequence[EpisodeRequest]) -> None:
        """Have the first episodes of a later iteration played, after all that wait, by the newest weights there are.

        The caller sees to it that these are new enough: it submits iteration k + max_staleness after publishing version
        k, at the earliest.
        """
        self._ahead[iteration] = job = _Job(iteration, requests)
        self._enqueue(job, len(self._waiting))

    def holds(self, iteration: int) -> bool:
        """Whether first episodes of an iteration were submitted and not yet taken."""
        return iteration in self._ahead

    def take(self, iteration: int, on_episode: Callable[[FinishedEpisode], None]) -> tuple[list[Sample], RolloutStats]:
        """Wait for the episodes submitted for an iteration; exceptions of the rollout are raised here."""
        found = self._wait(self._ahead[iteration], on_episode)
        del self._ahead[iteration]
        return found

    def play(
        self,
        iteration: int,
        requests: Sequence[EpisodeRequest],
        on_episode: Callable[[FinishedEpisode], None],
        *,
        greedy: bool = False,
    ) -> tuple[list[Sample], RolloutStats]:
        """Play episodes of the current iteration before all others that wait."""
        job = _Job(iteration, requests, greedy)
        self._enqueue(job, 0)
        return self._wait(job, on_episode)

    @contextmanager
    def idle(self, asked_to_stop: Callable[[], bool]) -> Iterator[None]:
        """Inside the block no episodes are played ahead; those that run are finished first, unless asked to stop."""
        with self._changed:
            self._paused = True
            while self._running is not None:
                self._cancelled |= asked_to_stop()
                self._changed.wait(_LOOK_EVERY_S)
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread; episodes that run are given up."""
        with self._changed:
            self._closed = self._cancelled = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _enqueue(self, job: _Job, place: int) -> None:
        with self._changed:
            self._waiting.insert(place, job)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="rollout", daemon=True)
            self._thread.start()

    def _wait(self, job: _Job, on_episode: Callable[[FinishedEpisode], None]) -> tuple[list[Sample], RolloutStats]:
        shown, over = 0, False
        while not over:
            over = bool(wait([job.outcome], _LOOK_EVERY_S).done)
            for episode in job.finished[shown:]:
                on_episode(episode)
                shown += 1
        return job.outcome.result()

    # -------------------------------------------------------------- on the thread
    def _serve(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.outcome.set_result(self._played(job))
            except BaseException as error:  # raised where the episodes are waited for
                job.outcome.set_exception(error)
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        """Wait for episodes that may be played; None once it is closed."""
        with self._changed:
            while not self._closed and (self._paused or not self._waiting):
                self._changed.wait()
            if self._closed:
                return None
            self._running = self._waiting.pop(0)
            self._policy.renew()
            return self._running

    def _played(self, job: _Job) -> tuple[list[Sample], RolloutStats]:
        self._rollout.rewards.start_iteration(job.iteration, self._batch.iterations)
        self._policy.anneal_noise(self._batch, job.iteration)
        samples = self._rollout.run(
            job.requests,
            self._policy,
            temperature=self._batch.temperature,
            greedy=job.greedy,
            on_episode=job.finished.append,
            cancelled=lambda: self._cancelled,
        )
        return samples, self._rollout.stats


class Staleness(Observer):
    """Measures by how many versions the decisions of an iteration are older than the policy they train."""

    def after_rollout(self, rollout: Rollout, metrics: Metrics) -> None:
        """Add async/staleness_mean and async/staleness_max."""
        found = [sample.versions for sample in rollout.samples if sample.versions is not None]
        ages = rollout.iteration - torch.cat(found) if found else torch.zeros(0)
        mean = ages.float().mean() if len(ages) else torch.zeros(())
        metrics.mean({"async/staleness_mean": mean}, len(ages))
        metrics.maximum({"async/staleness_max": ages.max() if len(ages) else 0.0})

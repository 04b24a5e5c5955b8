"""Players: the episodes of a plan with a progress bar, interruptible by a signal, synchronously or ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self

from torch import nn

from rlvla.evaluation.evaluate import SuccessOnBar
from rlvla.experience import Sample
from rlvla.models.policy import RolloutPolicy
from rlvla.rollout import EpisodeRequest, FinishedEpisode, RolloutEngine
from rlvla.rollout.backends import RolloutBackend
from rlvla.rollout.config import COLOCATED, ROLLOUT_BACKENDS
from rlvla.rollout.stats import RolloutStats
from rlvla.trainer.ahead import Played, RolloutAhead, set_noise
from rlvla.trainer.algorithm import Algorithm
from rlvla.trainer.config import AsyncConfig, LoopBatchConfig, TrainerConfig
from rlvla.trainer.measurements import Stopwatch
from rlvla.utils.bars import progress_bar
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.signals import BrokenOff, StopSignals

P = ParamSpec("P")


class Player:
    """Plays episodes on this rank's workers.

    Args:
        rollout: the rollout engine.
        strategy: used to stop all ranks together.
        signals: interrupt the rollout.
        batch: sampling temperature, and number of iterations.
        backend: acts with the weights at the start of an iteration; None: the policy itself acts.

    Attributes:
        stats: statistics of all episodes of the iteration.
        reward_metrics: metrics of the reward sources and the backend, to be summed over ranks.
        waited_s: seconds spent waiting for the episodes.
    """

    def __init__(
        self,
        rollout: RolloutEngine,
        strategy: DeepspeedStrategy,
        signals: StopSignals,
        batch: LoopBatchConfig,
        backend: RolloutBackend | None = None,
    ):
        self._rollout, self._strategy, self._signals = rollout, strategy, signals
        self._batch, self._backend = batch, backend
        self._clear(0)

    def begin(self, iteration: int) -> None:
        """Begin an iteration, counted from 0."""
        self._clear(iteration)
        self._rollout.rewards.start_iteration(iteration, self._batch.iterations)

    def _clear(self, iteration: int) -> None:
        self._iteration, self.stats, self.waited_s = iteration, RolloutStats(), 0.0
        self.reward_metrics: dict[str, float] = {}

    def play(
        self, requests: Sequence[EpisodeRequest], policy: RolloutPolicy, description: str, *, greedy: bool = False
    ) -> list[Sample]:
        """Play the requested episodes; returns those that succeeded within the retries, in the order of their requests.

        Raises:
            BrokenOff: a signal was received on any rank.
        """
        watch = Stopwatch()
        total = int(self._strategy.all_reduce({"requests": len(requests)}, "sum")["requests"])
        with progress_bar(total, description, enabled=self._strategy.is_main) as bar:
            on_episode = SuccessOnBar(bar)
            played = self._signals.attempt(lambda: self._played(requests, policy, on_episode, greedy))
        if self._strategy.any(played is None):
            raise BrokenOff("a signal interrupted the rollout")
        assert played is not None
        self.waited_s += watch.elapsed
        for part in fields(RolloutStats):
            setattr(self.stats, part.name, getattr(self.stats, part.name) + getattr(played.stats, part.name))
        for name, value in played.reward_metrics.items():
            self.reward_metrics[name] = self.reward_metrics.get(name, 0.0) + value
        return played.samples

    def _played(
        self,
        requests: Sequence[EpisodeRequest],
        policy: Any,
        on_episode: Callable[[FinishedEpisode], None],
        greedy: bool,
    ) -> Played:
        rollout, backend = self._rollout, self._backend
        if backend is not None:
            if backend.version < self._iteration:
                backend.load(policy, self._iteration)
            set_noise(backend, self._batch, self._iteration)
        options = {"temperature": self._batch.temperature, "greedy": greedy}
        samples = rollout.run(requests, policy if backend is None else backend, on_episode=on_episode, **options)
        of_backend = {} if backend is None else backend.metrics()
        return Played(samples, rollout.stats, rollout.rewards.metrics() | of_backend)

    def play_ahead(self, algorithm: Algorithm, policy: RolloutPolicy) -> None:
        """Start playing the next episodes, after all episodes of the current iteration were received."""

    def idle(self) -> AbstractContextManager[None]:
        """Inside the block nothing is played ahead, so that the workers are free."""
        return nullcontext()

    def close(self) -> None:
        """Discard episodes played ahead, and close the backend."""
        if self._backend is not None:
            self._backend.close()

    def __enter__(self) -> Self:
        """Closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()


class AsyncPlayer(Player):
    """Plays all episodes on a thread, including episodes of later iterations ahead of time.

    Args:
        ahead: the thread.
        batch: number of iterations, and sampling temperature.
        config: number of iterations to play ahead, and when new weights are used.
        rollout, strategy, signals, backend: as for `Player`.
    """

    def __init__(
        self,
        ahead: RolloutAhead,
        batch: LoopBatchConfig,
        config: AsyncConfig,
        rollout: RolloutEngine,
        strategy: DeepspeedStrategy,
        signals: StopSignals,
        backend: RolloutBackend,
    ):
        self._ahead, self._config = ahead, config
        super().__init__(rollout, strategy, signals, batch, backend)

    def begin(self, iteration: int) -> None:
        """Begin an iteration; the thread begins it for the rewards."""
        self._clear(iteration)

    def _played(
        self,
        requests: Sequence[EpisodeRequest],
        policy: Any,
        on_episode: Callable[[FinishedEpisode], None],
        greedy: bool,
    ) -> Played:
        number = self._iteration
        if self._ahead.holds(number):
            if self._config.partial_rollout:
                self._ahead.publish(policy, number)
            return self._ahead.take(number, on_episode)
        self._ahead.publish(policy, number)
        return self._ahead.play(number, requests, on_episode, greedy=greedy)

    def play_ahead(self, algorithm: Algorithm, policy: Any) -> None:
        """Submit the first episodes of the next iterations, with the weights of this one or newer."""
        self._ahead.publish(policy, self._iteration)
        last = min(self._iteration + self._config.max_staleness, self._batch.iterations - 1)
        for iteration in range(self._iteration + 1, last + 1):
            requests = [] if self._ahead.holds(iteration) else algorithm.plan_ahead(iteration)
            if requests:
                self._ahead.submit(iteration, requests)

    def idle(self) -> AbstractContextManager[None]:
        """Finish the running episodes first, unless a signal asks to stop."""
        return self._ahead.idle(lambda: self._signals.received != 0)

    def close(self) -> None:
        """End the thread and the backend."""
        self._ahead.close()
        super().close()


def closes_player(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Decorate an `__init__` so that it closes `self.player` if it fails."""

    @wraps(init)
    def closing(self: Any, *args: P.args, **options: P.kwargs) -> None:
        try:
            init(self, *args, **options)
        except BaseException:
            if hasattr(self, "player"):
                self.player.close()
            raise

    return closing


def make_player(
    config: TrainerConfig, policy: nn.Module, rollout: RolloutEngine, strategy: DeepspeedStrategy, signals: StopSignals
) -> Player:
    """The player of a run; call it before DeepSpeed changes the policy, of which the backend is made."""
    ahead, setup, batch = config.asynchronous, config.backend, config.batch
    name = setup.config.rollout_backend
    if config.schedule.val_only or (name == COLOCATED and not ahead.plays_ahead):
        return Player(rollout, strategy, signals, batch)
    setup = replace(setup, device=strategy.device, rank=strategy.rank, ranks=strategy.world_size)
    backend = ROLLOUT_BACKENDS.get(name)(policy, setup)
    if not ahead.plays_ahead:
        return Player(rollout, strategy, signals, batch, backend=backend)
    thread = RolloutAhead(rollout, backend, ahead, batch, device=strategy.device)
    return AsyncPlayer(thread, batch, ahead, rollout=rollout, strategy=strategy, signals=signals, backend=backend)

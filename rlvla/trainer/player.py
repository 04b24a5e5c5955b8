"""Playing the episodes of a plan with a progress bar, interruptible by a signal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rlvla.evaluation.evaluate import SuccessOnBar
from rlvla.experience import Sample
from rlvla.models.policy import RolloutPolicy
from rlvla.rollout import EpisodeRequest, RolloutEngine
from rlvla.rollout.stats import RolloutStats
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.stopping import BrokenOff, StopSignals
from rlvla.utils.terminal import progress_bar


class Player:
    """Plays episodes on this rank's workers.

    Args:
        rollout: the rollout engine.
        strategy: used to stop all ranks together.
        signals: interrupt the rollout.
        temperature: sampling temperature.

    Attributes:
        stats: statistics of all episodes since `reset`.
    """

    def __init__(self, rollout: RolloutEngine, strategy: DeepspeedStrategy, signals: StopSignals, temperature: float):
        self._rollout, self._strategy, self._signals = rollout, strategy, signals
        self._temperature = temperature
        self.stats = RolloutStats()

    def reset(self) -> None:
        """Reset the statistics."""
        self.stats = RolloutStats()

    def play(
        self, requests: Sequence[EpisodeRequest], policy: RolloutPolicy, description: str, *, greedy: bool = False
    ) -> list[Sample]:
        """Play the requested episodes; returns those that did not keep failing, in the order of their requests.

        Raises:
            BrokenOff: a signal was received on any rank.
        """
        with progress_bar(len(requests), description, enabled=self._strategy.is_main) as bar:
            on_episode = SuccessOnBar(bar)
            samples = self._signals.attempt(
                lambda: self._rollout.run(
                    requests, policy, temperature=self._temperature, greedy=greedy, on_episode=on_episode
                )
            )
        if self._strategy.any(samples is None):
            raise BrokenOff("a signal interrupted the rollout")
        assert samples is not None
        for part in fields(RolloutStats):
            setattr(self.stats, part.name, getattr(self.stats, part.name) + getattr(self._rollout.stats, part.name))
        return samples

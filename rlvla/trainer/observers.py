"""Callbacks of the training loop, and the data they receive."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlvla.data.rollouts import dump_rollouts
from rlvla.envs.config import EnvConfig
from rlvla.experience import Experience, Sample
from rlvla.models.policy import Policy
from rlvla.rewards import RewardPlan
from rlvla.rollout.stats import RolloutStats
from rlvla.trainer.metrics import Metrics
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.files import BestEffortWriter, require_room


@dataclass
class Rollout:
    """The rollout of an iteration on this rank.

    Attributes:
        iteration: counted from 0.
        samples: the sampled episodes, without greedy baselines.
        stats: statistics of all episodes played, including baselines.
        num_episodes: number of all episodes played, including baselines.
        start_evaluation: success at end of the initial policy and number of episodes, if it was evaluated.
        reward_metrics: metrics of the reward sources on this rank, to be summed over ranks.
        values: metrics that are already reduced over ranks; observers may add to them.
    """

    iteration: int
    samples: list[Sample] = field(default_factory=list)
    stats: RolloutStats = field(default_factory=RolloutStats)
    num_episodes: int = 0
    start_evaluation: tuple[float, int] | None = None
    reward_metrics: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerStep:
    """An optimizer step that was taken, or skipped because loss or gradient was not finite.

    Attributes:
        model: "actor", "critic", or another name that the algorithm uses.
        engine: the engine of that model.
        norm: gradient norm; not finite if the step was skipped.
        rows: the training rows of this rank.
        iteration: counted from 0.
        metrics: metrics of the update.
        counts: whether the rows count towards throughput; False for a second model trained on the same rows.
    """

    model: str
    engine: Engine
    norm: float
    rows: Experience
    iteration: int
    metrics: Metrics
    counts: bool = True


class Observer:
    """Base class of callbacks such as guards, measurements and dumps; by default the methods do nothing."""

    def after_rollout(self, rollout: Rollout, metrics: Metrics) -> None:
        """All episodes of an iteration have been played."""

    def after_step(self, step: OptimizerStep) -> None:
        """An optimizer step was taken or skipped."""

    def after_steps(self, seconds: float, metrics: Metrics) -> None:
        """All optimizer steps of an iteration were taken, in `seconds` on this rank; `metrics` are not yet reduced."""

    def after_update(self, values: dict[str, float]) -> None:
        """The update of an iteration is done; `values` are its metrics over all ranks."""

    def after_iteration(self, values: dict[str, float]) -> None:
        """An iteration is done and logged; `values` are all its metrics over all ranks."""


class RolloutDumps(Observer):
    """Writes all training episodes to disk, as HDF5 files for supervised training or conversion.

    Args:
        folder: parent folder of the dumps of the run.
        rank: this process; each writes separate files.
        env: the environment.
        policy: gives the normalized dimensions of actions.
    """

    def __init__(self, folder: Path, rank: int, env: EnvConfig, policy: Policy):
        self._folder, self._rank, self._policy = folder, rank, policy
        self._env = env.with_ordinary_actions()
        self._best_effort = BestEffortWriter(f"{folder} (rank {rank})")

    def after_rollout(self, rollout: Rollout, metrics: Metrics) -> None:
        """Write the episodes of the iteration; without room for them, only a warning is given."""
        if rollout.samples:
            self._best_effort.attempt(lambda: self._dump(rollout))

    def _dump(self, rollout: Rollout) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # HDF5 cannot close a file that it could not write.
        require_room(self._folder, sum(sample.env_images.nbytes for sample in rollout.samples))
        number = rollout.iteration + 1  # counted from 1, as in the log
        dump_rollouts(self._folder, number, self._rank, rollout.samples, self._env, self._policy)


class RewardCheck(Observer):
    """Reduces the metrics of the reward sources over ranks and lets each source check whether the run may continue.

    Args:
        rewards: the reward sources.
        strategy: reduces the metrics.
    """

    def __init__(self, rewards: RewardPlan, strategy: DeepspeedStrategy):
        self._rewards, self._strategy = rewards, strategy

    def after_rollout(self, rollout: Rollout, metrics: Metrics) -> None:
        """Add the metrics of the sources to the rollout; an error of a source is raised on all ranks."""
        values = self._strategy.all_reduce(rollout.reward_metrics, "sum")
        if values:  # empty on all ranks if groups carried over fill the iteration
            self._rewards.check(values)
        rollout.values |= values

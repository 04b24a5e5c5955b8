"""The interface of a learning algorithm: it plans episodes, receives them, and updates the policy.

The loop around it is `rlvla.trainer.trainer.Trainer`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlvla.data.demonstrations import Demonstrations
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import SplitConfig
from rlvla.experience import Sample
from rlvla.rollout import EpisodeRequest, task_sampler
from rlvla.rollout.episode import FinishedEpisode
from rlvla.rollout.task_sampler import Sampler
from rlvla.trainer.algorithm_config import LEARNERS, AlgorithmConfig
from rlvla.trainer.config import LoopBatchConfig, PPOConfig, TrainerConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.metrics_writer import PPO_OVERVIEW, Layout, ppo_layout
from rlvla.trainer.models import LoopModels, Models
from rlvla.trainer.observers import Observer, OptimizerStep
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine, OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import Problem

register_algorithm = LEARNERS.register


@dataclass(frozen=True)
class Plan:
    """Episodes to be played with the current policy.

    Attributes:
        requests: the episodes to play on this rank.
        greedy: take the most likely actions; such episodes are baselines and are left out of the rollout metrics.
    """

    requests: Sequence[EpisodeRequest]
    greedy: bool = False


class LearnerSetup:
    """Constructor arguments of a learner.

    Attributes:
        models: the networks, in host memory.
        strategy: process group and DeepSpeed engines.
        config: the configuration of the run.
        tasks: the training tasks.
        demos: demonstrations for a supervised loss or the replay buffer, or None.
    """

    models: LoopModels
    strategy: DeepspeedStrategy
    config: TrainerConfig
    tasks: Sequence[TaskSpec]
    demos: Demonstrations | None

    def sampler(self) -> Sampler:
        """A sampler of the training instances (task and initial state), in the order of the run."""
        return make_sampler(self.config.batch, self.tasks, self.config.split, self.strategy.seed)


@dataclass
class AlgorithmSetup(LearnerSetup):
    """Constructor arguments of a learner of `cli/train_ppo_vla.py`; attributes as in `LearnerSetup`."""

    models: Models
    strategy: DeepspeedStrategy
    config: PPOConfig
    tasks: Sequence[TaskSpec]
    demos: Demonstrations | None = None

    def prepare(self, model: nn.Module, learning_rate: float, steps: int, *, small: bool = False) -> Engine:
        """Wrap a model and its optimizer in an engine.

        Args:
            model: the network.
            learning_rate: the highest of the schedule.
            steps: length of the schedule.
            small: see `DeepspeedStrategy.prepare`.
        """
        optimization = self.config.optimization
        optimizer = OptimConfig(
            learning_rate,
            betas=(optimization.adam_betas[0], optimization.adam_betas[1]),
            weight_decay=optimization.l2,
            scheduler=optimization.lr_scheduler,
            warmup_ratio=optimization.lr_warmup_ratio,
            total_steps=max(1, steps),
        )
        return self.strategy.prepare(model, optimizer, small=small)


def make_sampler(batch: LoopBatchConfig, tasks: Sequence[TaskSpec], split: SplitConfig, seed: int) -> Sampler:
    """The sampler of the training instances; ConfigError if its flags do not fit the tasks."""
    states = [split.train_states(task) for task in tasks]
    return task_sampler.make_sampler(batch, tasks, states, batch.n_samples_per_prompt, seed)


def update_sampler(sampler: Sampler, samples: Sequence[Sample], strategy: DeepspeedStrategy) -> None:
    """Pass the finished episodes of all ranks to an adaptive sampler; called on every rank."""
    if sampler.observes:
        finished = strategy.gather_objects([FinishedEpisode.of(sample) for sample in samples])
        sampler.observe([episode for of_rank in finished for episode in of_rank])


class Algorithm:
    """A learning algorithm; registered by `register_algorithm(name)` and selected by `--algorithm NAME`.

    In each iteration the loop calls `plan` and `ingest` until `plan` returns None, and then `update`. All ranks call
    each method the same number of times.

    Args:
        setup: models, strategy, configuration and tasks.

    Attributes:
        actor: engine of the policy that is played, evaluated and exported; set by `__init__` of the subclass.
        observers: their `after_step` is called for each optimizer step; set by the loop.
        uses_critic: whether a critic is loaded.
        uses_reference: whether a reference policy is loaded.
        played_tensors: the entry of `tensors` with the weights of rollouts, if those are not the trained ones.
        unread: names of unread flags, which are refused; "policy_loss" includes the options of all losses.
        scores: the `PolicySpec.scores` it trains on; `OF_POLICY_LOSS`: those of --policy_loss; None: any.
        overview: scalar -> its additional name in TensorBoard, for the most telling ones.
    """

    overview: Mapping[str, str] = PPO_OVERVIEW
    uses_critic = uses_reference = False
    unread: Collection[str] = ()
    scores: str | None = None
    played_tensors: str | None = None
    actor: Engine

    def __init__(self, setup: LearnerSetup):
        self.setup = setup
        self.observers: list[Observer] = []

    @classmethod
    def problems(cls, algorithm: AlgorithmConfig, strategy: StrategyConfig) -> list[Problem]:
        """Settings with which it cannot train."""
        return []

    def layout(self, rewards: Iterable[str]) -> Layout:
        """The charts of TensorBoard's Custom Scalars page, with these reward sources."""
        return ppo_layout(rewards)

    @property
    def engines(self) -> dict[str, Engine]:
        """All trained models, by their names in checkpoints."""
        return {"actor": self.actor}

    def pretrain(self) -> Iterator[None]:
        """Updates before the first evaluation and episode of a new run; a signal can end it where it yields."""
        yield from ()

    def plan(self, iteration: int) -> Plan | None:
        """The next episodes to play, or None (on all ranks alike) if there are enough for an update."""
        raise NotImplementedError

    def plan_ahead(self, iteration: int) -> Sequence[EpisodeRequest]:
        """The first episodes of a later iteration, which its first `plan` returns again (`--async_rollout`).

        Called in the order of the iterations, and again after a resume; checkpoints hold the result until that `plan`.
        An algorithm without this method cannot play ahead.
        """
        raise NotImplementedError

    def ingest(self, samples: Sequence[Sample]) -> None:
        """Receive the episodes of the last plan, without those whose environment kept failing."""
        raise NotImplementedError

    def update(self, metrics: Metrics) -> dict[str, float]:
        """Train on the episodes received.

        Args:
            metrics: metrics of the iteration, which the loop reduces over ranks; may be added to.

        Returns:
            Further metrics, equal on all ranks.
        """
        raise NotImplementedError

    def rollout_weights(self) -> AbstractContextManager[None]:
        """Inside the block the actor has the weights for rollouts, evaluation and export; by default its own."""
        return nullcontext()

    def interrupt(self) -> None:
        """Discard the current iteration: a signal interrupted its rollout, and it is repeated after a resume."""

    def is_idle(self, values: Mapping[str, float]) -> bool:
        """Whether an iteration with these metrics could not change the policy, see `--max_idle_iterations`."""
        return False

    def after_step(self, step: OptimizerStep) -> None:
        """Notify the observers of an optimizer step."""
        for observer in self.observers:
            observer.after_step(step)

    def state_dict(self) -> dict[str, Any]:
        """JSON-serializable state, equal on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; `state` may contain further keys."""

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors for checkpoints in addition to `engines`: group -> name -> tensor, equal on all ranks."""
        return {}

    def load_tensors(self, tensors: Mapping[str, dict[str, Tensor]]) -> None:
        """Restore `tensors`; there may be further names."""

    def rank_state_dict(self) -> dict[str, Any]:
        """Picklable state specific to this rank."""
        return {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `rank_state_dict` of this rank."""

    def state_damage(self, states: Sequence[dict[str, Any]]) -> str | None:
        """Defect of files outside a checkpoint that its `rank_state_dict`s, of all ranks, refer to; None without one.

        Called on the main rank, to find the newest intact checkpoint; must change nothing.
        """
        return None

    def checkpoint_written(self) -> None:
        """Delete data that only older checkpoints need: the one with the last `rank_state_dict` is complete."""

    def reshard_state(self, states: Sequence[dict[str, Any]]) -> str:
        """Restore from the `rank_state_dict`s of a different number of ranks; returns a description for the log."""
        return self.share_out(states)

    def share_out(self, states: Sequence[dict[str, Any]]) -> str:
        """Deprecated name of `reshard_state`."""
        return "each rank starts with an empty state"

"""PPO and related methods: one iteration from episodes to updated weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvla.algorithms.kl import AdaptiveKLController, FixedKLController
from rlvla.data.demonstrations import Demonstrations
from rlvla.envs.base import TaskSpec
from rlvla.experience import Sample
from rlvla.rollout import EpisodeRequest, RolloutEngine
from rlvla.trainer.algorithm import Algorithm, AlgorithmSetup, Plan, register_algorithm
from rlvla.trainer.algorithm_config import OF_POLICY_LOSS, AlgorithmConfig
from rlvla.trainer.collection import Collection, demonstration_loss
from rlvla.trainer.config import PPOConfig
from rlvla.trainer.guards import advantages_vanish
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.models import Models
from rlvla.trainer.rollout_correction import Interpolation
from rlvla.trainer.scoring import Networks
from rlvla.trainer.trainer import Trainer
from rlvla.trainer.updater import UpdatePhase, Updater
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.signals import StopSignals


@register_algorithm("ppo")
class PPO(Algorithm):
    """On-policy learning with any advantage estimator and policy loss of `rlvla.algorithms`.

    Attributes:
        collection: collects groups of episodes and turns them into training rows.
        kl: controls the KL coefficient.
    """

    uses_critic = uses_reference = True
    scores = OF_POLICY_LOSS

    def __init__(self, setup: AlgorithmSetup):
        super().__init__(setup)
        config, strategy, models = setup.config, setup.strategy, setup.models
        batch, optimization = config.batch, config.optimization
        steps = batch.max_epochs * (batch.episodes_per_iteration // batch.train_batch_size)
        trained = batch.iterations - optimization.freezing_actor_steps
        self.actor = setup.prepare(models.actor, optimization.actor_learning_rate, trained * steps)
        self.critic: Engine | None = None
        if models.critic is not None:
            self.critic = setup.prepare(models.critic, optimization.critic_learning_rate, batch.iterations * steps)
        for frozen in models.frozen:
            strategy.prepare_frozen(frozen)
        critic = self.actor if config.algorithm.share_backbone else self.critic
        networks = Networks(self.actor, critic, models.reference)
        self.collection = Collection(setup, networks)
        self.kl = kl_controller(config.algorithm)
        interpolation = Interpolation(config.correction) if config.asynchronous.interpolates else None
        updater = Updater(strategy, batch, config.algorithm, models.actor, interpolation)
        parts = (updater, self.actor, self.critic, self.after_step, demonstration_loss(setup))
        self._phase = UpdatePhase(strategy, batch, optimization, *parts)

    @property
    def engines(self) -> dict[str, Engine]:
        """The actor and, unless it shares the actor's network, the critic."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    # ------------------------------------------------------------- collecting
    def plan(self, iteration: int) -> Plan | None:
        """See `Collection.plan`."""
        return self.collection.plan(iteration)

    def plan_ahead(self, iteration: int) -> Sequence[EpisodeRequest]:
        """See `GroupCollector.plan_ahead`."""
        return self.collection.collector.plan_ahead(iteration)

    def ingest(self, samples: Sequence[Sample]) -> None:
        """See `Collection.ingest`."""
        self.collection.ingest(samples)

    def is_idle(self, values: Mapping[str, float]) -> bool:
        """Whether all advantages were zero."""
        return advantages_vanish(values)

    def interrupt(self) -> None:
        """See `Collection.interrupt`."""
        self.collection.interrupt()

    # ----------------------------------------------------------------- update
    def update(self, metrics: Metrics) -> dict[str, float]:
        """Update from the collected groups (`Collection.train`), then the KL coefficient."""
        values = self.collection.train(self._phase, self.observers, metrics, kl_coef=self.kl.value)
        values["actor/lr"] = self.actor.learning_rate
        if self.setup.config.algorithm.init_kl_coef:
            values["actor/kl_coef"] = self.kl.value
        if "actor/ref_kl" in values:
            episodes = self.collection.groups * self.setup.config.batch.n_samples_per_prompt
            self.kl.update(values["actor/ref_kl"], episodes)
        return values

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """The KL coefficient, and the state of the collection."""
        return {"kl": self.kl.state_dict(), **self.collection.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.kl.load_state_dict(state["kl"])
        self.collection.load_state_dict(state)

    def rank_state_dict(self) -> dict[str, Any]:
        """See `Collection.rank_state_dict`."""
        return self.collection.rank_state_dict()

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `rank_state_dict`."""
        self.collection.load_rank_state_dict(state)

    def share_out(self, states: Sequence[dict[str, Any]]) -> str:
        """See `Collection.share_out`."""
        return self.collection.share_out(states)


class PPOTrainer(Trainer):
    """The training loop with PPO, or with the algorithm that `config.algorithm.algorithm` names.

    Args:
        models: actor, critic and reference policy.
        strategy: process group and DeepSpeed engines.
        rollout: plays episodes on this rank's workers.
        tasks: tasks for training and evaluation.
        config: the configuration of the run.
        save_path: run folder, which receives metrics, TensorBoard files, and `policy/` at the end.
        ckpt_path: folder of the training checkpoints.
        signals: records signals that ask the run to stop.
        demos: demonstrations for a supervised loss, or None.
    """

    def __init__(
        self,
        models: Models,
        strategy: DeepspeedStrategy,
        rollout: RolloutEngine,
        tasks: Sequence[TaskSpec],
        config: PPOConfig,
        save_path: Path,
        ckpt_path: Path,
        signals: StopSignals | None = None,
        demos: Demonstrations | None = None,
    ):
        setup = AlgorithmSetup(models, strategy, config, tasks, demos)
        super().__init__(setup, rollout, save_path, ckpt_path, signals)


def kl_controller(algorithm: AlgorithmConfig) -> FixedKLController:
    """The controller of the KL coefficient: adaptive if there is a target, otherwise constant."""
    if algorithm.kl_target is not None:
        return AdaptiveKLController(algorithm.init_kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    return FixedKLController(algorithm.init_kl_coef)

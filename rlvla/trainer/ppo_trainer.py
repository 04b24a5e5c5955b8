"""PPO and related methods: one iteration from episodes to updated weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlvla.algorithms.kl import AdaptiveKLController, FixedKLController
from rlvla.data.demonstrations import Demonstrations
from rlvla.envs.base import TaskSpec
from rlvla.experience import Sample
from rlvla.rollout import EpisodeRequest, FinishedEpisode, RolloutEngine
from rlvla.rollout.user_sampler import UserSampler
from rlvla.trainer.algorithm import Algorithm, AlgorithmSetup, Plan, register_algorithm
from rlvla.trainer.algorithm_config import OF_POLICY_LOSS, AlgorithmConfig
from rlvla.trainer.config import PPOConfig
from rlvla.trainer.experience_maker import ExperienceMaker
from rlvla.trainer.group_collector import Collected, GroupCollector, reshard_if_any_empty
from rlvla.trainer.guards import advantages_vanish
from rlvla.trainer.measurements import Stopwatch
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.models import Models
from rlvla.trainer.replay import ReplayList
from rlvla.trainer.scoring import Networks
from rlvla.trainer.supervised.demonstration_loss import DemonstrationLoss
from rlvla.trainer.trainer import Trainer
from rlvla.trainer.updater import UpdatePhase, Updater
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.stopping import StopSignals
from rlvla.utils.terminal import log


@register_algorithm("ppo")
class PPO(Algorithm):
    """On-policy learning with any advantage estimator and policy loss of `rlvla.algorithms`.

    Attributes:
        maker: turns episodes into training rows.
        replay: the training rows of an iteration.
        kl: controls the KL coefficient.
        collector: selects the groups of episodes to train on.
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
        parts = (config.algorithm, config.correction, config.reward_weights)
        self.maker = ExperienceMaker(networks, strategy, batch, *parts)
        self.replay = ReplayList()
        self.kl = kl_controller(config.algorithm)
        self._sampler = setup.sampler()
        self.collector = GroupCollector(self._sampler, strategy, batch, config.filters)
        updater = Updater(strategy, batch, config.algorithm, models.actor)
        demonstrations = None
        if setup.demos is not None:
            sizes = (optimization.ptx_batch_size, batch.micro_train_batch_size)
            demonstrations = DemonstrationLoss(setup.demos, models.actor, strategy, optimization.ptx_coef, *sizes)
        self._phase = UpdatePhase(
            strategy, batch, optimization, updater, self.actor, self.critic, self.after_step, demonstrations
        )
        self._iteration = 0
        self._collected: Collected | None = None
        # For `remax`: uid -> rewards and executed actions of the greedy episode, both [S, A].
        self._greedy: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def engines(self) -> dict[str, Engine]:
        """The actor and, unless it shares the actor's network, the critic."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    # ------------------------------------------------------------- collecting
    def plan(self, iteration: int) -> Plan | None:
        """Rounds of groups until enough are kept, then the greedy baselines for `remax`."""
        self._iteration = iteration
        if self._collected is None:
            requests = self.collector.plan(iteration)
            if requests is not None:
                return Plan(requests)
            self._collected = self.collector.collected()
        wants_baselines = self.setup.config.algorithm.needs_greedy_episodes and self._greedy is None
        if wants_baselines and self._collected.samples:
            firsts = {sample.uid: sample for sample in reversed(self._collected.samples)}
            return Plan(_requests(list(firsts.values())), greedy=True)
        return None

    def ingest(self, samples: Sequence[Sample]) -> None:
        """Receive the episodes of a round, or the greedy baselines."""
        if self._collected is None:
            self.collector.ingest(samples)
        else:
            self._greedy = {sample.uid: (sample.rewards, sample.executed) for sample in samples}

    def is_idle(self, values: Mapping[str, float]) -> bool:
        """Whether all advantages were zero."""
        return advantages_vanish(values)

    def interrupt(self) -> None:
        """Discard the groups of this iteration; those carried over into it are kept."""
        self.collector.abandon()
        self._collected = self._greedy = None

    # ----------------------------------------------------------------- update
    def update(self, metrics: Metrics) -> dict[str, float]:
        """Update from the collected groups: experience -> replay list -> optimizer steps -> KL coefficient."""
        collected, baselines = self._collect(metrics)
        watch = Stopwatch("make_experience", "update")
        values: dict[str, float] = {}
        if collected.samples:
            with watch.phase("make_experience"):
                experience, measured = self.maker.make(collected.samples, self.kl.value, baselines)
            self.replay.append(experience)
            with watch.phase("update"):
                self._phase.run(self._iteration, self.replay, self.kl.value, measured)
            self.replay.clear()
            for observer in self.observers:
                observer.after_steps(watch.seconds["update"], measured)
            values = measured.reduce(self.setup.strategy)
        values["actor/lr"] = self.actor.learning_rate
        if self.setup.config.algorithm.init_kl_coef:
            values["actor/kl_coef"] = self.kl.value
        if "actor/ref_kl" in values:
            self.kl.update(values["actor/ref_kl"], collected.groups * self.setup.config.batch.n_samples_per_prompt)
        metrics.mean({f"timing_s/{name}": seconds for name, seconds in watch.seconds.items()}, 1.0)
        return values

    def _collect(self, metrics: Metrics) -> tuple[Collected, torch.Tensor | None]:
        """The groups to train on and, for `remax`, the score of the greedy episode for each sample."""
        collected, greedy = self._collected, self._greedy
        assert collected is not None
        self._collected = self._greedy = None
        self.collector.commit()
        if isinstance(self._sampler, UserSampler):
            played = self.setup.strategy.gather_objects([FinishedEpisode.of(sample) for sample in collected.played])
            self._sampler.observe([episode for part in played for episode in part])
        baselines, scaling = None, self.maker.reward_scaling
        self.maker.update_reward_scale(collected.samples)
        if greedy is not None:
            strategy = self.setup.strategy
            mean_score = sum(float(rewards.sum()) for rewards, _ in greedy.values()) / max(1, len(greedy))
            metrics.mean({"rollout/greedy_score": mean_score}, len(greedy))
            # If the environment of a greedy episode kept failing, its group is dropped.
            comparable = [sample for sample in collected.samples if sample.uid in greedy]
            collected.samples, collected.groups = reshard_if_any_empty(comparable, strategy)
            scaled = {uid: scaling(*episode) if scaling.active else episode[0] for uid, episode in greedy.items()}
            mine = {uid: float(rewards.sum()) for uid, rewards in scaled.items()}
            scores = {uid: score for part in strategy.gather_objects(mine) for uid, score in part.items()}
            baselines = torch.tensor([scores[sample.uid] for sample in collected.samples])
        metrics.mean({"rollout/rounds": collected.counts.pop("rounds")}, 1.0)
        metrics.total({f"rollout/{name}": number for name, number in collected.counts.items()})
        self._log_missing_groups(collected)
        return collected, baselines

    def _log_missing_groups(self, collected: Collected) -> None:
        wanted = self.setup.config.batch.rollout_batch_size
        if collected.groups >= wanted or not self.setup.strategy.is_main:
            return
        filters = self.setup.config.filters
        how = f"passed the filters in {filters.max_rollout_rounds} rounds" if filters.active else "did not fail"
        what = f"training on these {collected.groups}" if collected.groups else "no update"
        kept = "fewer groups than ranks" if not collected.groups else f"{collected.groups} of {wanted} groups"
        log.info(f"iteration {self._iteration + 1}: {kept} {how}; {what}")

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """The KL coefficient, the running moments of returns and rewards, and the state of a sampler of the user's."""
        normalizer = self.maker.value_normalizer
        moments = None if normalizer is None else normalizer.state_dict()
        scaling = self.maker.reward_scaling.state_dict()
        state = {"kl": self.kl.state_dict(), "value_normalizer": moments, "reward_scaling": scaling}
        if isinstance(self._sampler, UserSampler):
            state["task_sampler"] = self._sampler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.kl.load_state_dict(state["kl"])
        if self.maker.value_normalizer is not None:
            self.maker.value_normalizer.load_state_dict(state["value_normalizer"])
        if "reward_scaling" in state:  # checkpoints before 0.2 have none
            self.maker.reward_scaling.load_state_dict(state["reward_scaling"])
        if isinstance(self._sampler, UserSampler):
            self._sampler.load_state_dict(state.get("task_sampler"))

    def rank_state_dict(self) -> dict[str, Any]:
        """The groups carried over."""
        return {"groups": self.collector.state_dict()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `rank_state_dict`."""
        self.collector.load_state_dict(state["groups"], self.actor.module.prepare)

    def share_out(self, states: Sequence[dict[str, Any]]) -> str:
        """Re-shard the groups carried over."""
        carried = self.collector.share_out([state["groups"] for state in states], self.actor.module.prepare)
        return f"the task sampler continues where it was, {carried} waiting group(s) are re-sharded"


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


def _requests(samples: Sequence[Sample]) -> list[EpisodeRequest]:
    """Requests for episodes from the same initial states."""
    return [EpisodeRequest(s.suite, s.task_id, s.init_state_id, s.seed, s.uid) for s in samples]

"""The base of on-policy learners: collect groups of episodes, make training rows with advantages, run the updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlvla.experience import Experience, Sample
from rlvla.rollout import EpisodeRequest
from rlvla.trainer.algorithm import Algorithm, AlgorithmSetup, Plan, update_sampler
from rlvla.trainer.experience_maker import ExperienceMaker
from rlvla.trainer.group_collector import Collected, GroupCollector, reshard_if_any_empty
from rlvla.trainer.guards import advantages_vanish
from rlvla.trainer.measurements import Stopwatch
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.replay import ReplayList
from rlvla.trainer.rollout_correction import Interpolation
from rlvla.trainer.scoring import Networks
from rlvla.trainer.supervised.demonstration_loss import DemonstrationLoss
from rlvla.trainer.updater import UpdatePhase, Updater
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.terminal import log

# Largest decrease and increase per iteration of the scale of the learning rate, and its limit.
_LOWER, _RAISE, _LARGEST = 4.0, 2.0, 10.0
_MIN_FRACTION = 0.2  # of the peak, below which a rate says little about the peak


def adapted_scale(scale: float, kl: float, desired: float, fraction: float) -> float:
    """The scale of a learning-rate schedule that brings the KL of an iteration closer to a desired one.

    Changed if the KL is more than twice or less than half the desired one (as the adaptive schedule of rsl_rl, Rudin
    et al. 2021). The KL grows with the square of the step, so that the factor is the square root of their ratio, at
    least 1/4 and at most 2 per iteration, and the scale stays within 1/10 and 10. An iteration at this fraction of the
    peak should have `fraction**2` of the KL: warm-up and decay keep their shape.

    Args:
        scale: the current one.
        kl: mean KL of the iteration's optimizer steps to the policy before it, in nats per log-prob; may be infinite.
        desired: KL at the peak of the schedule.
        fraction: mean learning rate of the iteration over the current peak; below 0.2 the scale is kept.
    """
    if fraction < _MIN_FRACTION:
        return scale
    expected = desired * fraction**2
    if expected / 2 <= kl <= 2 * expected:
        return scale
    factor = math.sqrt(expected / kl) if kl > 0 else _RAISE
    return min(max(scale * min(max(factor, 1 / _LOWER), _RAISE), 1 / _LARGEST), _LARGEST)


class OnPolicy(Algorithm):
    """Learns from advantages of the episodes played in each iteration.

    Attributes:
        critic: engine of a separate critic, or None.
        maker: turns episodes into training rows.
        collector: selects the groups of episodes to train on.
        replay: the training rows of an iteration.
        updater_type: takes the optimizer steps.
    """

    setup: AlgorithmSetup
    critic: Engine | None = None
    updater_type: type[Updater] = Updater

    def __init__(self, setup: AlgorithmSetup):
        super().__init__(setup)
        config, strategy, models = setup.config, setup.strategy, setup.models
        batch, optimization = config.batch, config.optimization
        # Optimizer steps of an iteration, of which filters and `target_kl` may leave out some.
        self._planned_steps = steps = batch.max_epochs * (batch.episodes_per_iteration // batch.train_batch_size)
        trained = batch.iterations - optimization.freezing_actor_steps
        self.actor = setup.prepare(models.actor, optimization.actor_learning_rate, trained * steps)
        if models.critic is not None:
            self.critic = setup.prepare(models.critic, optimization.critic_learning_rate, batch.iterations * steps)
        for frozen in models.frozen:
            strategy.prepare_frozen(frozen)
        critic = self.actor if config.algorithm.share_backbone else self.critic
        self._sampler = setup.sampler()
        self.maker = ExperienceMaker(
            Networks(self.actor, critic, models.reference),
            strategy,
            batch,
            config.algorithm,
            correction=config.correction,
            reward_weights=config.reward_weights,
            interpolates=config.asynchronous.interpolates,
        )
        self.collector = GroupCollector(self._sampler, strategy, batch, config.filters)
        self.replay = ReplayList()
        demonstrations = None
        if setup.demos is not None:
            demonstrations = DemonstrationLoss(
                setup.demos,
                models.actor,
                strategy,
                optimization.ptx_coef,
                rows=optimization.ptx_batch_size,
                micro_rows=batch.micro_train_batch_size,
                max_tokens=batch.train_max_tokens_per_gpu if batch.use_dynamic_batch else None,
            )
        interpolation = Interpolation(config.correction) if config.asynchronous.interpolates else None
        self._phase = UpdatePhase(
            strategy,
            batch,
            optimization,
            updater=self.updater_type(strategy, batch, config.algorithm, models.actor, interpolation),
            actor=self.actor,
            critic=self.critic,
            after_step=self.after_step,
            demonstrations=demonstrations,
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
        needs_baselines = self.setup.config.algorithm.needs_greedy_episodes and self._greedy is None
        if needs_baselines and self._collected.samples:
            firsts = {sample.uid: sample for sample in reversed(self._collected.samples)}.values()
            states = [EpisodeRequest(s.suite, s.task_id, s.init_state_id, s.seed, s.uid) for s in firsts]
            return Plan(states, greedy=True)
        return None

    def plan_ahead(self, iteration: int) -> Sequence[EpisodeRequest]:
        """See `GroupCollector.plan_ahead`."""
        return self.collector.plan_ahead(iteration)

    def ingest(self, samples: Sequence[Sample]) -> None:
        """Receive the episodes of a round, or the greedy baselines."""
        if self._collected is None:
            self.collector.ingest(samples)
        else:
            self._greedy = {sample.uid: (sample.rewards, sample.executed) for sample in samples}

    def interrupt(self) -> None:
        """Discard the groups of this iteration; those carried over into it are kept."""
        self.collector.abandon()
        self._collected = self._greedy = None

    def is_idle(self, values: Mapping[str, float]) -> bool:
        """Whether all advantages were zero, without a loss on demonstrations."""
        imitated = self._phase.demonstrations is not None and "actor/optimizer_steps" in values
        return not imitated and advantages_vanish(values)

    # ----------------------------------------------------------------- update
    @property
    def kl_coef(self) -> float:
        """Weight of the KL to the reference policy."""
        return 0.0

    def adapt_rows(self, rows: Experience, samples: Sequence[Sample]) -> Experience:
        """The training rows made from `samples`, changed for the loss; by default as they are."""
        return rows

    def update(self, metrics: Metrics) -> dict[str, float]:
        """Train on the collected groups: episodes -> experience -> replay list -> optimizer steps."""
        rate = self.actor.learning_rate
        collected, baselines = self._take(metrics)
        watch = Stopwatch("make_experience", "update")
        values: dict[str, float] = {}
        if collected.samples:
            kl_coef = self.kl_coef
            with watch.phase("make_experience"):
                rows, measured = self.maker.make(collected.samples, kl_coef, baselines, self._iteration)
            self.replay.append(self.adapt_rows(rows, collected.samples))
            with watch.phase("update"):
                self._phase.run(self._iteration, self.replay, kl_coef, measured)
            self.replay.clear()
            for observer in self.observers:
                observer.after_steps(watch.seconds["update"], measured)
            values = measured.reduce(self.setup.strategy)
            self._adapt_learning_rate(rate, values)
        metrics.mean({f"timing_s/{name}": seconds for name, seconds in watch.seconds.items()}, 1.0)
        self._align_schedules(self._iteration + 1)
        values["actor/lr"] = self.actor.learning_rate
        self.finish_update(values, collected.groups)
        return values

    def _adapt_learning_rate(self, before: float, values: Mapping[str, float]) -> None:
        """Scale the schedule toward `desired_kl`, see `adapted_scale`; `before`: the rate of the first step."""
        optimization, peak = self.setup.config.optimization, self.actor.peak_learning_rate
        desired, kl = optimization.desired_kl, values.get("actor/ppo_kl", math.nan)
        steps = values.get("actor/optimizer_steps", 0.0)  # the KL of the first one is that of unchanged weights, 0
        if desired is None or math.isnan(kl) or not peak or steps < 2 or self.is_idle(values):
            return
        scale = peak / optimization.actor_learning_rate
        adapted = adapted_scale(scale, kl, desired, (before + self.actor.learning_rate) / (2 * peak))
        self.actor.scale_learning_rate(adapted / scale)

    def _align_schedules(self, done: int) -> None:
        """Continue the schedules after `done` iterations, even if some of their steps were left out."""
        trained = max(0, done - self.setup.config.optimization.freezing_actor_steps)
        self.actor.set_schedule_step(trained * self._planned_steps)
        if self.critic is not None:
            self.critic.set_schedule_step(done * self._planned_steps)

    def finish_update(self, values: dict[str, float], groups: int) -> None:
        """Adapt the learner to the metrics of its update on this number of groups over all ranks; may add metrics."""

    def _take(self, metrics: Metrics) -> tuple[Collected, torch.Tensor | None]:
        """The groups to train on and, for `remax`, the score of the greedy episode for each of their episodes."""
        collected, greedy, strategy = self._collected, self._greedy, self.setup.strategy
        assert collected is not None
        self._collected = self._greedy = None
        self.collector.commit()
        update_sampler(self._sampler, collected.played, strategy)
        baselines, scaling = None, self.maker.reward_scaling
        self.maker.update_reward_scale(collected.samples)
        if greedy is not None:
            mean_score = sum(float(rewards.sum()) for rewards, _ in greedy.values()) / max(1, len(greedy))
            metrics.mean({"rollout/greedy_score": mean_score}, len(greedy))
            # If the environment of a greedy episode kept failing, its group is dropped.
            comparable = [sample for sample in collected.samples if sample.uid in greedy]
            collected.samples, collected.groups = reshard_if_any_empty(comparable, strategy)
            scaled = {uid: scaling(*episode) if scaling.active else episode[0] for uid, episode in greedy.items()}
            local = {uid: float(rewards.sum()) for uid, rewards in scaled.items()}
            scores = {uid: score for of_rank in strategy.gather_objects(local) for uid, score in of_rank.items()}
            baselines = torch.tensor([scores[sample.uid] for sample in collected.samples])
        metrics.mean({"rollout/rounds": collected.counts.pop("rounds")}, 1.0)
        metrics.total({f"rollout/{name}": number for name, number in collected.counts.items()})
        total = self.setup.config.batch.rollout_batch_size
        if collected.groups < total and strategy.is_main:
            filters, groups = self.setup.config.filters, collected.groups
            how = f"passed the filters in {filters.max_rollout_rounds} rounds" if filters.active else "did not fail"
            outcome = f"training on these {groups}" if groups else "no update"
            kept = f"{groups} of {total} groups" if groups else "fewer groups than ranks"
            log.info(f"iteration {self._iteration + 1}: {kept} {how}; {outcome}")
        return collected, baselines

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """The running moments of returns, rewards and the critic's input, and the state of the task sampler."""
        normalizer, sampler = self.maker.value_normalizer, self._sampler.state_dict()
        moments = None if normalizer is None else normalizer.state_dict()
        state = {"value_normalizer": moments, "reward_scaling": self.maker.reward_scaling.state_dict()}
        if self.maker.state_normalizer is not None:
            state["state_normalizer"] = self.maker.state_normalizer.state_dict()
        return state if sampler is None else state | {"task_sampler": sampler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        if self.maker.value_normalizer is not None:
            self.maker.value_normalizer.load_state_dict(state["value_normalizer"])
        if self.maker.state_normalizer is not None:
            self.maker.state_normalizer.load_state_dict(state["state_normalizer"])
        if "reward_scaling" in state:  # checkpoints before 0.2 have none
            self.maker.reward_scaling.load_state_dict(state["reward_scaling"])
        self._sampler.load_state_dict(state.get("task_sampler"))
        self._align_schedules(state["iteration"])  # a run that is extended has another schedule

    def rank_state_dict(self) -> dict[str, Any]:
        """The groups carried over."""
        return {"groups": self.collector.state_dict()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `rank_state_dict`."""
        self.collector.load_state_dict(state["groups"], self.actor.module.prepare)

    def reshard_state(self, states: Sequence[dict[str, Any]]) -> str:
        """Re-shard the groups carried over."""
        carried = self.collector.reshard_state([state["groups"] for state in states], self.actor.module.prepare)
        return f"the task sampler continues where it was, {carried} waiting group(s) are re-sharded"

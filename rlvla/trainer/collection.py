"""What learners on advantages share: collecting the groups of an iteration, and training on rows made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlvla.experience import Experience, Sample
from rlvla.rollout import EpisodeRequest
from rlvla.trainer.algorithm import AlgorithmSetup, Plan, show_sampler
from rlvla.trainer.experience_maker import ExperienceMaker
from rlvla.trainer.group_collector import Collected, GroupCollector, reshard_if_any_empty
from rlvla.trainer.measurements import Stopwatch
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.observers import Observer
from rlvla.trainer.replay import ReplayList
from rlvla.trainer.scoring import Networks
from rlvla.trainer.supervised.demonstration_loss import DemonstrationLoss
from rlvla.trainer.updater import UpdatePhase
from rlvla.utils.terminal import log


class Collection:
    """Collects the groups of episodes of an iteration, turns them into rows with advantages, and trains on them.

    Args:
        setup: what the learner is constructed from.
        networks: score the episodes.

    Attributes:
        maker: turns episodes into training rows.
        collector: selects the groups of episodes to train on.
        replay: the training rows of an iteration.
        groups: number of groups trained on last, over all ranks.
    """

    def __init__(self, setup: AlgorithmSetup, networks: Networks):
        config = setup.config
        self._setup, self._sampler = setup, setup.sampler()
        parts = (config.algorithm, config.correction, config.reward_weights)
        interpolates = config.asynchronous.interpolates
        self.maker = ExperienceMaker(networks, setup.strategy, config.batch, *parts, interpolates=interpolates)
        self.collector = GroupCollector(self._sampler, setup.strategy, config.batch, config.filters)
        self.replay, self.groups = ReplayList(), 0
        self._prepare = networks.actor.module.prepare
        self._iteration = 0
        self._collected: Collected | None = None
        # For `remax`: uid -> rewards and executed actions of the greedy episode, both [S, A].
        self._greedy: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None

    # ------------------------------------------------------------- collecting
    def plan(self, iteration: int) -> Plan | None:
        """Rounds of groups until enough are kept, then the greedy baselines for `remax`."""
        self._iteration = iteration
        if self._collected is None:
            requests = self.collector.plan(iteration)
            if requests is not None:
                return Plan(requests)
            self._collected = self.collector.collected()
        wants_baselines = self._setup.config.algorithm.needs_greedy_episodes and self._greedy is None
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

    def interrupt(self) -> None:
        """Discard the groups of this iteration; those carried over into it are kept."""
        self.collector.abandon()
        self._collected = self._greedy = None

    def take(self, metrics: Metrics) -> tuple[list[Sample], torch.Tensor | None]:
        """The episodes to train on and, for `remax`, the score of the greedy episode for each of them."""
        collected, greedy = self._collected, self._greedy
        assert collected is not None
        self._collected = self._greedy = None
        self.collector.commit()
        show_sampler(self._sampler, collected.played, self._setup.strategy)
        baselines, scaling = None, self.maker.reward_scaling
        self.maker.update_reward_scale(collected.samples)
        if greedy is not None:
            strategy = self._setup.strategy
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
        self.groups = collected.groups
        return collected.samples, baselines

    def train(
        self,
        phase: UpdatePhase,
        observers: Sequence[Observer],
        metrics: Metrics,
        *,
        kl_coef: float = 0.0,
        adapt: Callable[[Experience, Sequence[Sample]], Experience] | None = None,
    ) -> dict[str, float]:
        """One update from the collected groups: episodes -> experience -> replay list -> optimizer steps.

        Args:
            phase: takes the optimizer steps.
            observers: of the learner.
            metrics: receives the metrics of the groups, and times.
            kl_coef: weight of the KL.
            adapt: changes the rows made of the episodes.

        Returns:
            The metrics of the update, equal on all ranks; none if there are no episodes.
        """
        samples, baselines = self.take(metrics)
        watch = Stopwatch("make_experience", "update")
        values: dict[str, float] = {}
        if samples:
            with watch.phase("make_experience"):
                experience, measured = self.maker.make(samples, kl_coef, baselines, self._iteration)
            self.replay.append(experience if adapt is None else adapt(experience, samples))
            with watch.phase("update"):
                phase.run(self._iteration, self.replay, kl_coef, measured)
            self.replay.clear()
            for observer in observers:
                observer.after_steps(watch.seconds["update"], measured)
            values = measured.reduce(self._setup.strategy)
        metrics.mean({f"timing_s/{name}": seconds for name, seconds in watch.seconds.items()}, 1.0)
        return values

    def _log_missing_groups(self, collected: Collected) -> None:
        wanted = self._setup.config.batch.rollout_batch_size
        if collected.groups >= wanted or not self._setup.strategy.is_main:
            return
        filters = self._setup.config.filters
        how = f"passed the filters in {filters.max_rollout_rounds} rounds" if filters.active else "did not fail"
        what = f"training on these {collected.groups}" if collected.groups else "no update"
        kept = "fewer groups than ranks" if not collected.groups else f"{collected.groups} of {wanted} groups"
        log.info(f"iteration {self._iteration + 1}: {kept} {how}; {what}")

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """The running moments of returns and rewards, and the state of the task sampler."""
        normalizer = self.maker.value_normalizer
        moments = None if normalizer is None else normalizer.state_dict()
        state = {"value_normalizer": moments, "reward_scaling": self.maker.reward_scaling.state_dict()}
        sampler = self._sampler.state_dict()
        return state if sampler is None else state | {"task_sampler": sampler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        if self.maker.value_normalizer is not None:
            self.maker.value_normalizer.load_state_dict(state["value_normalizer"])
        if "reward_scaling" in state:  # checkpoints before 0.2 have none
            self.maker.reward_scaling.load_state_dict(state["reward_scaling"])
        self._sampler.load_state_dict(state.get("task_sampler"))

    def rank_state_dict(self) -> dict[str, Any]:
        """The groups carried over."""
        return {"groups": self.collector.state_dict()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `rank_state_dict`."""
        self.collector.load_state_dict(state["groups"], self._prepare)

    def share_out(self, states: Sequence[dict[str, Any]]) -> str:
        """Re-shard the groups carried over."""
        carried = self.collector.share_out([state["groups"] for state in states], self._prepare)
        return f"the task sampler continues where it was, {carried} waiting group(s) are re-sharded"


def demonstration_loss(setup: AlgorithmSetup) -> DemonstrationLoss | None:
    """The supervised loss that is added to each step of the actor, or None."""
    if setup.demos is None:
        return None
    optimization, batch = setup.config.optimization, setup.config.batch
    sizes = (optimization.ptx_batch_size, batch.micro_train_batch_size)
    return DemonstrationLoss(setup.demos, setup.models.actor, setup.strategy, optimization.ptx_coef, *sizes)


def _requests(samples: Sequence[Sample]) -> list[EpisodeRequest]:
    """Requests for episodes from the same initial states."""
    return [EpisodeRequest(s.suite, s.task_id, s.init_state_id, s.seed, s.uid) for s in samples]

"""NFT: a flow-matching policy learns from successes and failures without densities and without a critic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.columns import Columns
from rlvla.algorithms.flow import mirrored_loss, nft_reward
from rlvla.algorithms.losses import aggregate_loss
from rlvla.experience import Experience, Sample
from rlvla.models.policy import Policy
from rlvla.rollout import EpisodeRequest
from rlvla.trainer.algorithm import Algorithm, AlgorithmSetup, Plan, register_algorithm
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.collection import Collection, demonstration_loss
from rlvla.trainer.guards import advantages_vanish
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.models import WeightAverage
from rlvla.trainer.scoring import Networks
from rlvla.trainer.updater import UpdatePhase, Updater
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.errors import Problem

_AVERAGE = "rollout"


@register_algorithm("nft")
class NFT(Algorithm):
    """Steps that went well attract the policy, those that went badly repel it (pi-StepNFT; `mirrored_loss`).

    The policy that plays, is evaluated and exported is a moving average of the trained one, updated once per iteration:
    average <- decay * average + (1 - decay) * weights, so that the steps of an iteration stay close to what sampled.

    Attributes:
        collection: collects groups of episodes and turns them into training rows.
        average: the policy that plays.
    """

    scores = "mirrored"
    unread = (
        *("policy_loss", "log_prob_level", "loss_agg_mode", "loss_horizon", "entropy_loss_coef", "init_kl_coef"),
        *("rollout_is", "rollout_rs", "ema_beta", "use_ema"),
    )
    played_tensors = _AVERAGE

    def __init__(self, setup: AlgorithmSetup):
        super().__init__(setup)
        config, strategy, models = setup.config, setup.strategy, setup.models
        batch, optimization = config.batch, config.optimization
        steps = batch.max_epochs * (batch.episodes_per_iteration // batch.train_batch_size)
        self.actor = setup.prepare(models.actor, optimization.actor_learning_rate, batch.iterations * steps)
        self.average = WeightAverage(self.actor, config.algorithm.learner_options.nft_rollout_decay)
        self.collection = Collection(setup, Networks(self.actor, None, None))
        updater = MirroredUpdater(strategy, batch, config.algorithm, models.actor)
        parts = (updater, self.actor, None, self.after_step, demonstration_loss(setup))
        self._phase = UpdatePhase(strategy, batch, optimization, *parts)

    @classmethod
    def problems(cls, algorithm: AlgorithmConfig, strategy: StrategyConfig) -> list[Problem]:
        """No critic; the average needs whole parameters."""
        problems = []
        if algorithm.needs_critic:
            text = (
                f"--algorithm nft has no critic, which --advantage_estimator {algorithm.advantage_estimator} needs; "
                "give one that compares episodes of a group, such as grpo"
            )
            problems.append(Problem("advantage_estimator", "contradiction", text))
        if strategy.zero_stage == 3:
            text = (
                "--zero_stage 3: --algorithm nft averages its weights, which must be whole on every rank; give 0 to 2"
            )
            problems.append(Problem("zero_stage", "contradiction", text))
        return problems

    def rollout_weights(self) -> AbstractContextManager[None]:
        """The moving average."""
        return self.average.in_place_of_weights()

    def plan(self, iteration: int) -> Plan | None:
        """See `Collection.plan`."""
        return self.collection.plan(iteration)

    def plan_ahead(self, iteration: int) -> Sequence[EpisodeRequest]:
        """See `GroupCollector.plan_ahead`."""
        return self.collection.collector.plan_ahead(iteration)

    def ingest(self, samples: Sequence[Sample]) -> None:
        """See `Collection.ingest`."""
        self.collection.ingest(samples)

    def interrupt(self) -> None:
        """See `Collection.interrupt`."""
        self.collection.interrupt()

    def is_idle(self, values: Mapping[str, float]) -> bool:
        """Whether all advantages were zero, which only pulls the policy to its average."""
        return self.setup.config.algorithm.learner_options.nft_reward == "advantage" and advantages_vanish(values)

    def update(self, metrics: Metrics) -> dict[str, float]:
        """Update from the collected groups (`Collection.train`), then the average."""
        values = self.collection.train(self._phase, self.observers, metrics, adapt=self._with_outcomes)
        self.average.update()
        values["actor/lr"] = self.actor.learning_rate
        return values

    def _with_outcomes(self, rows: Experience, samples: Sequence[Sample]) -> Experience:
        """The rows with what `nft_reward` makes 1 of success, and 0 of failure, in place of advantages, if asked to."""
        options = self.setup.config.algorithm.learner_options
        if options.nft_reward != "success":
            return rows
        decisions = torch.tensor([sample.num_decisions for sample in samples])
        success = torch.tensor([float(sample.success_at_end) for sample in samples]).repeat_interleave(decisions)
        outcomes = options.nft_clip * (2.0 * success - 1.0)
        return rows.with_fields(advantages=outcomes[:, None].expand_as(rows.advantages).contiguous())

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """See `Collection.state_dict`."""
        return self.collection.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
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

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The moving average."""
        return {_AVERAGE: self.average.state_dict()}

    def load_tensors(self, tensors: Mapping[str, dict[str, Tensor]]) -> None:
        """Restore the moving average."""
        self.average.load_state_dict(tensors[_AVERAGE])


class MirroredUpdater(Updater):
    """Optimizer steps on `mirrored_loss`, averaged over the decisions of all ranks."""

    def policy_step(
        self, engine: Engine, step: Experience, kl_coef: float, metrics: Metrics, *, first_of_iteration: bool
    ) -> float:
        """Take an optimizer step of the policy; measurements are added to `metrics`.

        `actor/ppo_kl` is the KL from the policy that sampled to the trained one, in nats per column.

        Returns:
            The gradient norm; not finite if the step was skipped.
        """
        policy: Policy = engine.module
        counts = self._normalizer.count(step.policy_mask, step.episode_index)
        engine.train()
        for micro, rows, count, last in self._micro_batches(step):
            mask = micro.policy_mask
            outputs = engine(**policy.score(micro, self._batch.temperature), wants=("mirrored",))
            terms = {name: outputs[f"mirrored/{name}"] for name in ("shift", "agreement", "residual")}
            reward = nft_reward(_row_mean(micro.advantages, mask), self._algorithm.learner_options.nft_clip)
            row_loss = mirrored_loss(terms, reward, mask, beta=self._algorithm.learner_options.nft_beta)
            options = self._normalizer.options(counts, rows, own_mode=True)
            del options["agg_mode"]
            loss = aggregate_loss(row_loss[:, None], mask.any(-1, keepdim=True), "seq-mean-token-sum", **options)
            self._measure(metrics, terms, reward, mask)
            self._add_loss(metrics, "actor/pg_loss", loss, count)
            norm = engine.backward(loss, last=last)
        metrics.mean({"actor/grad_norm": norm}, float(math.isfinite(norm)))
        return norm

    @staticmethod
    def _measure(metrics: Metrics, terms: Mapping[str, Tensor], reward: Tensor, mask: Tensor) -> None:
        """KL and the mean reward of a micro-batch."""
        valid = mask.any(-1)
        metrics.mean({"actor/ppo_kl": 0.5 * terms["shift"].detach()[mask].mean()}, float(mask.sum()))
        metrics.mean({"actor/nft_reward": reward[valid].mean()}, float(valid.sum()))


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, K] -> [B]: mean over the valid columns, 0 if there is none."""
    return Columns("chunk", mask.shape[1], 1).sum(values, mask)[:, 0] / mask.sum(-1).clamp(min=1)

"""NFT: a flow-matching policy learns from successes and failures without densities and without a critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rlvla.algorithms.columns import Columns
from rlvla.algorithms.flow import mirrored_loss, nft_reward
from rlvla.algorithms.losses import aggregate_loss
from rlvla.experience import Experience, Sample
from rlvla.models.policy import Policy
from rlvla.trainer.algorithm import AlgorithmSetup, register_algorithm
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.guards import advantages_vanish
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.models import WeightAverage
from rlvla.trainer.on_policy import OnPolicy
from rlvla.trainer.updater import Updater
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.errors import Problem

_AVERAGE = "rollout"


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
        learner = self._algorithm.learner_options
        counts = self._normalizer.count(step.policy_mask, step.episode_index)
        engine.train()
        for micro, rows, count, last in self._micro_batches(step):
            mask = micro.policy_mask
            outputs = engine(**policy.score(micro, self._batch.temperature), wants=("mirrored",))
            terms = {name: outputs[f"mirrored/{name}"] for name in ("shift", "agreement", "residual")}
            advantages = Columns("chunk", mask.shape[1], 1).sum(micro.advantages, mask)[:, 0]
            reward = nft_reward(advantages / mask.sum(-1).clamp(min=1), learner.nft_clip)
            row_loss = mirrored_loss(terms, reward, mask, beta=learner.nft_beta)
            options = self._normalizer.options(counts, rows, own_mode=True)
            del options["agg_mode"]
            loss = aggregate_loss(row_loss[:, None], mask.any(-1, keepdim=True), "seq-mean-token-sum", **options)
            valid = mask.any(-1)
            metrics.mean({"actor/ppo_kl": 0.5 * terms["shift"].detach()[mask].mean()}, float(mask.sum()))
            metrics.mean({"actor/nft_reward": reward[valid].mean()}, float(valid.sum()))
            self._add_loss(metrics, "actor/pg_loss", loss, count)
            norm = engine.backward(loss, last=last)
        return self._measured_norm("actor", norm, metrics)


@register_algorithm("nft")
class NFT(OnPolicy):
    """Good decisions attract the policy, bad ones repel it (pi-StepNFT; `mirrored_loss`).

    Rollouts, evaluation and export use a moving average of the trained policy, updated once per iteration:
    average <- decay * average + (1 - decay) * weights, so that training stays close to the policy that sampled.

    Attributes:
        average: the policy of rollouts.
    """

    scores = "mirrored"
    unread = (
        *("policy_loss", "log_prob_level", "loss_agg_mode", "loss_horizon", "entropy_loss_coef", "init_kl_coef"),
        *("rollout_is", "rollout_rs", "ema_beta", "use_ema"),
    )
    played_tensors = _AVERAGE

    updater_type = MirroredUpdater

    def __init__(self, setup: AlgorithmSetup):
        super().__init__(setup)
        self.average = WeightAverage(self.actor, setup.config.algorithm.learner_options.nft_rollout_decay)

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

    def is_idle(self, values: Mapping[str, float]) -> bool:
        """Whether all advantages were zero, which only pulls the policy to its average."""
        return self.setup.config.algorithm.learner_options.nft_reward == "advantage" and advantages_vanish(values)

    def finish_update(self, values: dict[str, float], groups: int) -> None:
        """Update the average."""
        self.average.update()

    def adapt_rows(self, rows: Experience, samples: Sequence[Sample]) -> Experience:
        """With --nft_reward success, replace advantages by those for which `nft_reward` is 1 (success) or 0."""
        options = self.setup.config.algorithm.learner_options
        if options.nft_reward != "success":
            return rows
        decisions = torch.tensor([sample.num_decisions for sample in samples])
        success = torch.tensor([float(sample.success_at_end) for sample in samples]).repeat_interleave(decisions)
        outcomes = options.nft_clip * (2.0 * success - 1.0)
        return rows.with_fields(advantages=outcomes[:, None].expand_as(rows.advantages).contiguous())

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The moving average."""
        return {_AVERAGE: self.average.state_dict()}

    def load_tensors(self, tensors: Mapping[str, dict[str, Tensor]]) -> None:
        """Restore the moving average."""
        self.average.load_state_dict(tensors[_AVERAGE])

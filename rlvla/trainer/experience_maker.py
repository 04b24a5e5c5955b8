"""From finished episodes to training rows: log-probs, values, rewards, advantages, returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlvla.algorithms.advantages import get_advantage_estimator
from rlvla.algorithms.kl import kl_penalty
from rlvla.experience import Experience, Sample
from rlvla.models.actor import Actor
from rlvla.models.reference import ReferenceModel
from rlvla.models.value_models import Critic, RewardModel
from rlvla.trainer.config import AlgorithmConfig, BatchConfig
from rlvla.trainer.levels import first_of_column, first_tokens, spread_columns, sum_columns, tokens_per_column
from rlvla.trainer.metrics import MetricMeans
from rlvla.trainer.replay import micro_batches
from rlvla.utils.strategy import DeepspeedStrategy, Engine


@dataclass
class Judges:
    """The models that look at an episode. `critic`, `reference` and `reward_model` are None where not used."""

    actor: Engine
    critic: Engine | None
    reference: ReferenceModel | None
    reward_model: RewardModel | None


class ExperienceMaker:
    """Turns the samples of a rank into `Experience` rows.

    Args:
        judges: actor, critic, reference and reward model.
        strategy: collectives.
        batch: temperature and batch sizes.
        algorithm: estimator, levels, KL.
        action_dim: D.
        reward_model_coef: weight of the reward model's score, added at the last executed action.
    """

    def __init__(
        self,
        judges: Judges,
        strategy: DeepspeedStrategy,
        batch: BatchConfig,
        algorithm: AlgorithmConfig,
        action_dim: int,
        reward_model_coef: float = 1.0,
    ):
        self._judges = judges
        self._strategy = strategy
        self._batch = batch
        self._algorithm = algorithm
        self._action_dim = action_dim
        self._reward_model_coef = reward_model_coef

    def make(self, samples: Sequence[Sample], kl_coef: float) -> tuple[Experience, dict[str, float]]:
        """Rows of all decisions in the order of the samples, and metrics of the rewards and advantages.

        Args:
            samples: finished episodes of this rank.
            kl_coef: current weight of the KL; used here only if the KL belongs into the reward.
        """
        rows = self._rows(samples)
        rows = self._score(rows)
        rewards = torch.cat([sample.rewards for sample in samples])  # [B, A]
        if self._judges.reward_model is not None:
            rewards = rewards + self._reward_model_scores(samples)
        kl = torch.zeros_like(rows.old_log_probs)
        if rows.ref_log_probs is not None:
            kl = kl_penalty(rows.old_log_probs, rows.ref_log_probs, self._algorithm.kl_estimator, rows.policy_mask)
        in_reward = kl_coef if rows.ref_log_probs is not None and not self._algorithm.use_kl_loss else 0.0
        rows = self._advantages(rows, samples, rewards, kl * in_reward)
        return rows, self._metrics(rows, samples, rewards, kl)

    def _rows(self, samples: Sequence[Sample]) -> Experience:
        mask = torch.cat([sample.action_mask for sample in samples])
        width = tokens_per_column(self._algorithm.advantage_level, mask.shape[1], self._action_dim)
        has_proprio = samples[0].proprio is not None
        return Experience(
            images=torch.cat([sample.images for sample in samples]),
            proprio=torch.cat([sample.proprio for sample in samples]) if has_proprio else None,
            instructions=[sample.instruction for sample in samples for _ in range(sample.num_decisions)],
            episode_index=torch.arange(len(samples)).repeat_interleave(
                torch.tensor([sample.num_decisions for sample in samples])
            ),
            action_tokens=torch.cat([sample.action_tokens for sample in samples]),
            action_mask=mask,
            policy_mask=mask & self._judges.actor.module.inputs.effective_tokens,
            value_mask=first_tokens(mask, width),
            rollout_log_probs=torch.cat([sample.rollout_log_probs for sample in samples]),
        )

    def _passes(self, rows: Experience, forward: Callable[[Experience], Tensor]) -> Tensor:
        """Run `forward` over micro-batches, equally many on every rank (ZeRO-3 needs that); results on the host."""
        size = self._batch.micro_rollout_batch_size
        count = int(self._strategy.all_reduce({"n": -(-len(rows) // size)}, "max")["n"])
        with torch.no_grad():
            parts = [forward(micro).cpu() for micro in micro_batches(rows, size, count)]
        return torch.cat(parts)[: len(rows)]

    def _score(self, rows: Experience) -> Experience:
        judges, temperature = self._judges, self._batch.temperature
        actor: Actor = judges.actor.module
        for engine in (judges.actor, judges.critic):
            if engine is not None:
                engine.train(False)
        values = ref_log_probs = None
        old_log_probs = self._passes(rows, lambda micro: judges.actor(**actor.score(micro, temperature))[0])
        if judges.critic is not None:
            values = self._values(judges.critic, rows)
        if judges.reference is not None:
            reference = judges.reference
            ref_log_probs = self._passes(rows, lambda micro: reference.log_probs(micro, temperature))
        return rows.with_fields(old_log_probs=old_log_probs, values=values, ref_log_probs=ref_log_probs)

    def _values(self, engine: Engine, rows: Experience) -> Tensor:
        critic: Critic = engine.module
        return self._passes(rows, lambda micro: engine(**critic.score(micro)))

    def _last_observations(self, samples: Sequence[Sample]) -> Experience:
        """One row per episode with what came after its last action; only the observation fields matter."""
        has_proprio = samples[0].last_proprio is not None
        blank = torch.zeros(len(samples), samples[0].action_mask.shape[1], dtype=torch.bool)
        return Experience(
            images=torch.stack([sample.last_images for sample in samples]),
            proprio=torch.stack([sample.last_proprio for sample in samples]) if has_proprio else None,
            instructions=[sample.instruction for sample in samples],
            action_mask=blank,
            policy_mask=blank,
            value_mask=blank,
        )

    def _reward_model_scores(self, samples: Sequence[Sample]) -> Tensor:
        """[B, A]: the weighted score of each episode at its last executed action."""
        model = self._judges.reward_model
        assert model is not None
        scores = self._passes(self._last_observations(samples), model.success_probability)
        placed = [torch.zeros_like(sample.rewards) for sample in samples]
        for sample, grid, score in zip(samples, placed, scores):
            grid.view(-1)[last_action(sample, self._action_dim)] = self._reward_model_coef * score
        return torch.cat(placed)

    def _advantages(self, rows: Experience, samples: Sequence[Sample], rewards: Tensor, kl: Tensor) -> Experience:
        """Estimate on a grid [episodes, decisions * columns], then hand the results back to the rows."""
        algorithm, num_tokens = self._algorithm, rows.action_mask.shape[1]
        width = tokens_per_column(algorithm.advantage_level, num_tokens, self._action_dim)
        mask = first_of_column(rows.action_mask, width)  # [B, L]
        token_rewards = torch.zeros(rows.action_mask.shape)
        token_rewards[:, self._action_dim - 1 :: self._action_dim] = rewards  # last token of each action
        column_rewards = sum_columns(token_rewards - kl, rows.action_mask, width)
        grid = EpisodeGrid([sample.num_decisions for sample in samples])
        extra = {}
        if rows.values is not None:
            values = grid.pack(first_of_column(rows.values, width))
            extra = {"values": values.to(self._strategy.device), "lam": algorithm.lambd}
            bootstrap = self._bootstrap(samples, width)
        packed_rewards, packed_mask = grid.pack(column_rewards), grid.pack(mask)
        if rows.values is not None:
            last = packed_mask.shape[1] - 1 - packed_mask.flip(1).int().argmax(1)
            packed_rewards[torch.arange(len(samples)), last] += algorithm.gamma * bootstrap
        if self._strategy.world_size > 1:
            extra["process_group"] = "world"
        estimate = get_advantage_estimator(algorithm.advantage_estimator)
        device = self._strategy.device  # a collective takes tensors of the accelerator only
        advantages, returns = estimate(
            packed_rewards.to(device),
            packed_mask.to(device),
            group_ids=[sample.uid for sample in samples],
            gamma=algorithm.gamma,
            norm_by_std=algorithm.norm_adv_by_std,
            **extra,
        )
        return rows.with_fields(
            advantages=spread_columns(grid.unpack(advantages.cpu(), mask.shape[1]), width),
            returns=spread_columns(grid.unpack(returns.cpu(), mask.shape[1]), width),
        )

    def _bootstrap(self, samples: Sequence[Sample], width: int) -> Tensor:
        """[episodes]: the critic's value after the last action of truncated episodes, 0 for terminated ones."""
        if not self._algorithm.bootstrap_truncated:
            return torch.zeros(len(samples))
        assert self._judges.critic is not None
        values = self._values(self._judges.critic, self._last_observations(samples))[:, 0]
        return torch.where(torch.tensor([sample.truncated for sample in samples]), values, torch.zeros_like(values))

    def _metrics(self, rows: Experience, samples: Sequence[Sample], rewards: Tensor, kl: Tensor) -> dict[str, float]:
        """Over the episodes of all ranks, which need not hold equally many tokens."""
        tokens, columns = rows.policy_mask, rows.value_mask
        advantages, returns = rows.advantages[tokens].double(), rows.returns[columns].double()
        over_tokens = {
            "rollout_corr/prob_diff_mean": (rows.old_log_probs.exp() - rows.rollout_log_probs.exp())[tokens].abs(),
            "actor/ref_kl": kl[tokens],
            "critic/advantages/mean": advantages,
            "advantages_squared": advantages.square(),
        }
        over_columns = {"critic/returns/mean": returns, "returns_squared": returns.square()}
        if rows.values is not None:
            values = rows.values[columns].double()
            over_columns |= {
                "critic/values/mean": values,
                "error": returns - values,
                "error_squared": (returns - values).square(),
            }
        means = MetricMeans()
        means.add({name: entries.mean() for name, entries in over_tokens.items()}, len(advantages))
        means.add({name: entries.mean() for name, entries in over_columns.items()}, len(returns))
        means.add({"reward/total": rewards.sum() / len(samples)}, len(samples))
        metrics = means.reduce(self._strategy)
        spread = metrics.pop("advantages_squared") - metrics["critic/advantages/mean"] ** 2
        metrics["critic/advantages/std"] = max(0.0, spread) ** 0.5
        total = metrics.pop("returns_squared") - metrics["critic/returns/mean"] ** 2
        if rows.values is not None:
            rest = metrics.pop("error_squared") - metrics.pop("error") ** 2
            metrics["critic/vf_explained_var"] = 1.0 - rest / total if total > 1e-8 else 0.0
        return metrics


def last_action(sample: Sample, action_dim: int) -> int:
    """Index of the last executed action in the flat [S * A] grid of an episode."""
    executed = sample.action_mask[:, ::action_dim].flatten()
    return int(executed.nonzero()[-1])


class EpisodeGrid:
    """Moves columns between rows [B, L] (decisions of all episodes, one after the other) and [episodes, S_max * L].

    Args:
        decisions: S of each episode, in row order.
    """

    def __init__(self, decisions: Sequence[int]):
        counts = torch.tensor(decisions)
        self._episodes, self._longest = len(decisions), int(counts.max())
        self._episode = torch.arange(len(decisions)).repeat_interleave(counts)
        starts = counts.cumsum(0) - counts
        self._decision = torch.arange(int(counts.sum())) - starts[self._episode]

    def pack(self, values: Tensor) -> Tensor:
        """[B, L] -> [episodes, S_max * L], zero (False) where an episode has no such decision."""
        packed = values.new_zeros(self._episodes, self._longest, values.shape[1])
        packed[self._episode, self._decision] = values
        return packed.flatten(1)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """The inverse of `pack`."""
        return packed.unflatten(1, (self._longest, columns))[self._episode, self._decision]

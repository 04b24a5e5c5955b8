"""From finished episodes to training rows: log-probs, values, rewards, advantages, returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.advantages import get_advantage_estimator
from rlvla.algorithms.kl import kl_penalty
from rlvla.algorithms.value_normalization import ValueNormalizer
from rlvla.experience import Experience, Sample
from rlvla.trainer.algorithm_config import AlgorithmConfig, CorrectionConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.correction import column_weights, correct_rollout
from rlvla.trainer.episode_grid import EpisodeGrid
from rlvla.trainer.levels import first_of_column, first_tokens, spread_columns, sum_columns, tokens_per_column
from rlvla.trainer.metrics import Metrics, explained_variance
from rlvla.trainer.replay import EPISODES_PER_RANK
from rlvla.trainer.scoring import REWARD_MODEL_COMPONENT, Judges, Scorer, last_observations
from rlvla.utils.strategy import DeepspeedStrategy


class ExperienceMaker:
    """Turns the samples of a rank into `Experience` rows.

    Args:
        judges: actor, critic, reference and reward model.
        strategy: collectives.
        batch: temperature and batch sizes.
        algorithm: estimator, levels, KL.
        action_dim: D.
        correction: of the gap between sampling and training policy.
        reward_weights: gives reward source -> weight that its component was multiplied by, for `gdpo`.
        reward_model_coef: weight of the reward model's score, added at the last executed action.

    Attributes:
        value_normalizer: running moments of the returns, with --normalize_values; part of a checkpoint.
    """

    def __init__(
        self,
        judges: Judges,
        strategy: DeepspeedStrategy,
        batch: BatchConfig,
        algorithm: AlgorithmConfig,
        action_dim: int,
        correction: CorrectionConfig | None = None,
        reward_weights: Callable[[], dict[str, float]] = dict,
        reward_model_coef: float = 1.0,
    ):
        self._scorer = Scorer(judges, strategy, batch, algorithm)
        self._strategy = strategy
        self._algorithm = algorithm
        self._action_dim = action_dim
        self._correction = correction or CorrectionConfig()
        self._reward_weights = reward_weights
        self._reward_model_coef = reward_model_coef
        self.value_normalizer = ValueNormalizer() if algorithm.normalize_values else None
        self._process_group = "world" if strategy.world_size > 1 else None

    def judge(self, samples: Sequence[Sample]) -> list[Sample]:
        """The episodes with the reward model's score added, if there is a reward model; before filters and `make`."""
        return self._scorer.judge(samples, self._reward_model_coef, self._action_dim)

    def make(
        self, samples: Sequence[Sample], kl_coef: float, reward_baselines: Tensor | None = None
    ) -> tuple[Experience, Metrics]:
        """Rows of all decisions in the order of the samples, and metrics of the rewards and advantages.

        Args:
            samples: finished episodes of this rank.
            kl_coef: current weight of the KL; used here only if the KL belongs into the reward.
            reward_baselines: [episodes], score of the greedy episode from the same state, for `remax`.
        """
        metrics = Metrics()
        rows = self._rows(samples)
        scored = self._scorer.policy(rows)
        squares = scored.pop("sum_pi_squared", None)
        kl = scored.pop("exact_kl", None)
        raw_values = scored.pop("values", None)
        rows = rows.with_fields(**scored)
        if self._scorer.judges.critic is not None:
            if raw_values is None:
                raw_values = self._scorer.values(rows)
            rows = rows.with_fields(values=self._denormalized(raw_values))
        if kl is None and rows.ref_log_probs is not None:
            kl = kl_penalty(rows.old_log_probs, rows.ref_log_probs, self._algorithm.kl_estimator, rows.policy_mask)
        if kl is None:
            kl = torch.zeros_like(rows.old_log_probs)
        kl = torch.where(rows.policy_mask, kl, 0.0)
        rows = correct_rollout(rows, self._correction, self._log_prob_width(rows), metrics, self._strategy)
        penalty = kl * (kl_coef if self._algorithm.kl_in_reward else 0.0)
        rows = self._advantages(rows, samples, penalty, squares, reward_baselines)
        self._measure(rows, samples, kl, metrics)
        if self.value_normalizer is not None and raw_values is not None:
            rows = self._normalized(rows, raw_values, self.value_normalizer)
        return rows, metrics

    def _rows(self, samples: Sequence[Sample]) -> Experience:
        mask = torch.cat([sample.action_mask for sample in samples])
        width = tokens_per_column(self._algorithm.advantage_level, mask.shape[1], self._action_dim)
        has_proprio = samples[0].proprio is not None
        return Experience(
            images=torch.cat([sample.images for sample in samples]),
            proprio=torch.cat([sample.proprio for sample in samples]) if has_proprio else None,
            instructions=[told for sample in samples for told in sample.decision_instructions],
            episode_index=self._strategy.rank * EPISODES_PER_RANK
            + torch.arange(len(samples)).repeat_interleave(torch.tensor([sample.num_decisions for sample in samples])),
            action_tokens=torch.cat([sample.action_tokens for sample in samples]),
            action_mask=mask,
            policy_mask=mask & self._scorer.judges.actor.module.inputs.effective_tokens,
            value_mask=first_tokens(mask, width),
            rollout_log_probs=torch.cat([sample.rollout_log_probs for sample in samples]),
        )

    def _log_prob_width(self, rows: Experience) -> int:
        return tokens_per_column(self._algorithm.log_prob_level, rows.action_mask.shape[1], self._action_dim)

    # -------------------------------------------------------------- advantages
    def _advantages(
        self,
        rows: Experience,
        samples: Sequence[Sample],
        penalty: Tensor,
        squares: Tensor | None,
        reward_baselines: Tensor | None,
    ) -> Experience:
        """Estimate on a grid [episodes, decisions * columns], then hand the results back to the rows."""
        algorithm = self._algorithm
        width = tokens_per_column(algorithm.advantage_level, rows.action_mask.shape[1], self._action_dim)
        mask = first_of_column(rows.action_mask, width)  # [B, L]
        grid = EpisodeGrid([sample.num_decisions for sample in samples])
        rewards = self._on_columns(torch.cat([sample.rewards for sample in samples]), rows, width)
        packed_rewards = grid.pack(rewards - sum_columns(penalty, rows.action_mask, width))
        packed_mask = grid.pack(mask)
        if rows.values is not None:
            last = packed_mask.shape[1] - 1 - packed_mask.flip(1).int().argmax(1)
            packed_rewards[torch.arange(len(samples)), last] += algorithm.gamma * self._bootstrap(samples)
        options = self._options(samples, reward_baselines)
        for name, columns in self._column_inputs(rows, samples, width, squares).items():
            options[name] = (
                {key: self._device(grid.pack(value)) for key, value in columns.items()}
                if isinstance(columns, dict)
                else self._device(grid.pack(columns))
            )
        estimate = get_advantage_estimator(algorithm.advantage_estimator)
        advantages, returns = estimate(self._device(packed_rewards), self._device(packed_mask), **options)
        return rows.with_fields(
            advantages=spread_columns(grid.unpack(advantages.cpu(), mask.shape[1]), width),
            returns=spread_columns(grid.unpack(returns.cpu(), mask.shape[1]), width),
        )

    def _device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._strategy.device)  # a collective takes tensors of the accelerator only

    def _on_columns(self, rewards: Tensor, rows: Experience, width: int) -> Tensor:
        """[B, A] per action -> [B, L] per column."""
        token_rewards = torch.zeros(rows.action_mask.shape)
        token_rewards[:, self._action_dim - 1 :: self._action_dim] = rewards  # last token of each action
        return sum_columns(token_rewards, rows.action_mask, width)

    def _options(self, samples: Sequence[Sample], reward_baselines: Tensor | None) -> dict[str, Any]:
        """The estimator's arguments that are not grids; those that its signature does not name are left out."""
        algorithm = self._algorithm
        offered = {
            "group_ids": [sample.uid for sample in samples],
            "gamma": algorithm.gamma,
            "lam": algorithm.lambd,
            "norm_by_std": algorithm.norm_adv_by_std,
            "singleton": algorithm.singleton,
            "f_norm": algorithm.f_norm,
            "handle_zero_tail": algorithm.handle_zero_tail,
            "reward_baselines": None if reward_baselines is None else self._device(reward_baselines),
            "component_weights": self._components(samples),
            "process_group": self._process_group,
        }
        return {name: value for name, value in offered.items() if name in algorithm.estimator_options}

    def _components(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Reward components with the weights they were multiplied by; those of no weight are left out."""
        known = {**self._reward_weights(), REWARD_MODEL_COMPONENT: self._reward_model_coef}
        weights = {name: known.get(name, 1.0) for name in samples[0].reward_components}
        return {name: weight for name, weight in weights.items() if weight}

    def _column_inputs(
        self, rows: Experience, samples: Sequence[Sample], width: int, squares: Tensor | None
    ) -> dict[str, Tensor | dict[str, Tensor]]:
        """The estimator's arguments with one number per column, [B, L]; only those that its signature names."""
        wanted, mask = self._algorithm.estimator_options, rows.policy_mask
        found: dict[str, Tensor | dict[str, Tensor]] = {}
        if rows.values is not None:
            found["values"] = first_of_column(rows.values, width)
        if "old_log_probs" in wanted:
            found["old_log_probs"] = sum_columns(rows.old_log_probs, mask, width)
        if squares is not None:
            # Tokens are drawn independently: the sum over all joint choices is the product of the tokens' sums.
            found["sum_pi_squared"] = sum_columns(squares.log(), mask, width).exp()
        if "rollout_weights" in wanted:
            weights = column_weights(rows, self._correction, width, self._strategy)
            if weights is not None:
                found["rollout_weights"] = weights
        if "component_rewards" in wanted:
            found["component_rewards"] = {
                name: self._on_columns(torch.cat([s.reward_components[name] for s in samples]) / weight, rows, width)
                for name, weight in self._components(samples).items()
            }
        return found

    def _bootstrap(self, samples: Sequence[Sample]) -> Tensor:
        """[episodes]: the critic's value after the last action of truncated episodes, 0 for terminated ones."""
        if not self._algorithm.bootstrap_truncated:
            return torch.zeros(len(samples))
        values = self._denormalized(self._scorer.values(last_observations(samples))[:, 0])
        return torch.where(torch.tensor([sample.truncated for sample in samples]), values, torch.zeros_like(values))

    # ------------------------------------------------------------------ values
    def _denormalized(self, values: Tensor) -> Tensor:
        return values if self.value_normalizer is None else self.value_normalizer.denormalize(values)

    def _normalized(self, rows: Experience, raw_values: Tensor, normalizer: ValueNormalizer) -> Experience:
        """Returns in the units of the critic's output, and that output itself for the value clip."""
        normalizer.update(self._device(rows.returns), self._device(rows.value_mask), self._process_group)
        return rows.with_fields(values=raw_values, returns=normalizer.normalize(rows.returns))

    # ----------------------------------------------------------------- metrics
    def _measure(self, rows: Experience, samples: Sequence[Sample], kl: Tensor, metrics: Metrics) -> None:
        """Over the episodes of all ranks, which need not hold equally many tokens."""
        tokens, columns = rows.policy_mask, rows.value_mask
        if self._scorer.judges.reference is not None:
            metrics.mean({"actor/ref_kl": kl[tokens].mean()}, float(tokens.sum()))
        scores = torch.tensor([sample.score for sample in samples])
        metrics.mean({"reward/total": scores.mean()}, len(samples))
        metrics.distribution("critic/score", scores)
        metrics.distribution("critic/advantages", rows.advantages[tokens])
        metrics.distribution("critic/returns", rows.returns[columns])
        if rows.values is not None:
            metrics.distribution("critic/values", rows.values[columns])
            metrics.distribution("_error", (rows.returns - rows.values)[columns])
            metrics.derived("critic/vf_explained_var", explained_variance("critic/returns", "_error"))

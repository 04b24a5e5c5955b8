"""Training rows from finished episodes: log-probs, values, rewards, advantages, returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.advantages import get_advantage_estimator
from rlvla.algorithms.columns import Columns, EpisodeGrid
from rlvla.algorithms.kl import kl_penalty
from rlvla.algorithms.masking import whiten_per_task
from rlvla.algorithms.reward_scaling import RewardScaling
from rlvla.algorithms.value_normalization import StateNormalizer, ValueNormalizer
from rlvla.experience import Experience, Sample
from rlvla.models.policy import Policy
from rlvla.options import keyword_arguments
from rlvla.trainer.algorithm_config import STATE, AlgorithmConfig, CorrectionConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.metrics import Metrics, explained_variance
from rlvla.trainer.replay import EPISODES_PER_RANK
from rlvla.trainer.rollout_correction import column_weights, correct_rollout
from rlvla.trainer.scoring import ModelPasses, Networks, Scores, last_observations
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy


class ExperienceMaker:
    """Turns the samples of a rank into `Experience` rows.

    Args:
        networks: actor, critic and reference policy.
        strategy: device, and reductions over ranks.
        batch: sampling temperature and micro-batch size.
        algorithm: advantage estimator, levels and KL.
        correction: correction of the mismatch between rollout and training policy.
        reward_weights: returns the weight of each reward source, by which `gdpo` divides its component.
        interpolates: old log-probs are found during the update (`Interpolation`); until then they are those at sampling
            time.

    Attributes:
        value_normalizer: running moments of the returns, with --normalize_values; saved in checkpoints.
        state_normalizer: running moments of the critic's input, with --critic_input state; saved in checkpoints.
        reward_scaling: scales the rewards before advantages are estimated; saved in checkpoints.
    """

    def __init__(
        self,
        networks: Networks,
        strategy: DeepspeedStrategy,
        batch: BatchConfig,
        algorithm: AlgorithmConfig,
        correction: CorrectionConfig | None = None,
        reward_weights: Callable[[], dict[str, float]] = dict,
        *,
        interpolates: bool = False,
    ):
        self._passes = ModelPasses(networks, strategy, batch, algorithm)
        self._policy: Policy = networks.actor.module
        spec = self._policy.spec
        self._columns = Columns(algorithm.advantage_level, spec.columns, spec.columns_per_action)
        self._log_prob_columns = Columns(algorithm.log_prob_level, spec.columns, spec.columns_per_action)
        self._strategy = strategy
        self._algorithm = algorithm
        self._correction = correction or CorrectionConfig()
        self._reward_weights, self._interpolates = reward_weights, interpolates
        self.value_normalizer = ValueNormalizer() if algorithm.normalize_values else None
        self.state_normalizer: StateNormalizer | None = None
        if networks.critic is not None and algorithm.critic_input == STATE:
            self.state_normalizer = StateNormalizer(networks.critic.module.state_dim)
        self.reward_scaling = RewardScaling(algorithm.normalize_reward, algorithm.reward_clip)
        self._process_group = "world" if strategy.world_size > 1 else None

    def make(
        self, samples: Sequence[Sample], kl_coef: float, reward_baselines: Tensor | None = None, version: int = 0
    ) -> tuple[Experience, Metrics]:
        """One row per decision in the order of the samples, and metrics of rewards and advantages.

        Args:
            samples: finished episodes of this rank.
            kl_coef: current KL coefficient; used here only if the KL is subtracted from the reward.
            reward_baselines: [episodes], score of the greedy episode from the same initial state, for `remax`; scaled
                like the rewards.
            version: of the policy before the update, see `Sample.versions`.
        """
        metrics = Metrics()
        first = self._strategy.rank * EPISODES_PER_RANK
        rows = Experience.from_samples(samples, self._policy.effective_columns, first)
        rows = rows.with_fields(value_mask=self._columns.starts(rows.action_mask))
        if self.state_normalizer is not None:
            states = self._padded_states(samples, slice(-1))
            self.state_normalizer.update(self._device(states), self._process_group)
            rows = rows.with_fields(critic_state=self.state_normalizer(states))
        versions = [sample.versions for sample in samples if sample.versions is not None]
        staleness = version - torch.cat(versions) if len(versions) == len(samples) else None  # [decisions] int64
        if staleness is not None:
            metrics.mean({"async/staleness_mean": staleness.float().mean()}, len(staleness))
            metrics.maximum({"async/staleness_max": staleness.max()})
        if self._interpolates:
            rows = rows.with_fields(staleness=staleness)
        scores = self._passes.scores_of_rollout(rows) if self._interpolates else self._passes.scores(rows)
        rows = rows.with_fields(
            old_log_probs=scores.old_log_probs,
            ref_log_probs=scores.ref_log_probs,
            reference=scores.reference,
            values=None if scores.values is None else self._denormalized(scores.values),
        )
        kl = self._kl(rows, scores)
        if not self._interpolates:
            rows = correct_rollout(rows, self._correction, self._log_prob_columns, metrics, self._strategy)
        penalty = kl * (kl_coef if self._algorithm.kl_in_reward else 0.0)
        rows = self._advantages(rows, samples, penalty, scores.sum_pi_squared, reward_baselines)
        self._measure(rows, samples, kl, metrics)
        if self.value_normalizer is not None and scores.values is not None:
            rows = self._normalized(rows, scores.values, self.value_normalizer)
        return rows, metrics

    def update_reward_scale(self, samples: Sequence[Sample]) -> None:
        """Update the running standard deviation of the rewards; called on every rank, with or without samples."""
        scores = torch.tensor([sample.score for sample in samples], dtype=torch.float64)
        self.reward_scaling.update(self._device(scores), self._process_group)

    def _rewards(self, samples: Sequence[Sample]) -> Tensor:
        """[B, A]: the rewards to train on."""
        if not self.reward_scaling.active:
            return torch.cat([sample.rewards for sample in samples])
        return torch.cat([self.reward_scaling(sample.rewards, sample.executed) for sample in samples])

    def _kl(self, rows: Experience, scores: Scores) -> Tensor:
        """[B, K]: KL to the reference where `policy_mask` is set, 0 elsewhere."""
        if scores.exact_kl is not None:
            kl = scores.exact_kl
        elif rows.ref_log_probs is not None:
            kl = kl_penalty(rows.old_log_probs, rows.ref_log_probs, self._algorithm.kl_estimator, rows.policy_mask)
        else:
            return torch.zeros_like(rows.old_log_probs)
        return torch.where(rows.policy_mask, kl, 0.0)

    # -------------------------------------------------------------- advantages
    def _advantages(
        self,
        rows: Experience,
        samples: Sequence[Sample],
        penalty: Tensor,
        squares: Tensor | None,
        reward_baselines: Tensor | None,
    ) -> Experience:
        """Estimate advantages and returns on a grid [episodes, decisions * columns] and map them back to the rows."""
        algorithm, columns = self._algorithm, self._columns
        mask = columns.first(rows.action_mask)  # [B, L]
        grid = EpisodeGrid([sample.num_decisions for sample in samples])
        rewards = columns.of_actions(self._rewards(samples), rows.action_mask)
        packed_rewards = grid.pack(rewards - columns.sum(penalty, rows.action_mask))
        packed_mask = grid.pack(mask)
        if rows.values is not None:
            last = packed_mask.shape[1] - 1 - packed_mask.flip(1).int().argmax(1)
            packed_rewards[torch.arange(len(samples)), last] += algorithm.gamma * self._bootstrap(samples)
        options = self._options(samples, reward_baselines)
        for name, values in self._column_inputs(rows, samples, squares).items():
            options[name] = (
                {key: self._device(grid.pack(value)) for key, value in values.items()}
                if isinstance(values, dict)
                else self._device(grid.pack(values))
            )
        estimate = get_advantage_estimator(algorithm.advantage_estimator)
        packed_mask = self._device(packed_mask)
        advantages, returns = estimate(self._device(packed_rewards), packed_mask, **options)
        if algorithm.whiten_per_task:
            advantages = self._whitened_per_task(advantages, packed_mask, samples)
        return rows.with_fields(
            advantages=columns.spread(grid.unpack(advantages.cpu(), columns.count)),
            returns=columns.spread(grid.unpack(returns.cpu(), columns.count)),
        )

    def _whitened_per_task(self, advantages: Tensor, mask: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Advantages [episodes, T], whitened over the episodes of each task on all ranks."""
        tasks = [(sample.suite, sample.task_id) for sample in samples]
        all_tasks = sorted({task for of_rank in self._strategy.gather_objects(tasks) for task in of_rank})
        numbers = self._device(torch.tensor([all_tasks.index(task) for task in tasks]))
        return whiten_per_task(advantages, mask, numbers, len(all_tasks), self._process_group)

    def _device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._strategy.device)  # collective operations need tensors on the accelerator

    def _options(self, samples: Sequence[Sample], reward_baselines: Tensor | None) -> dict[str, Any]:
        """Arguments of the estimator other than grids: its options, and the inputs that its signature names."""
        algorithm = self._algorithm
        parameters = algorithm.estimator_parameters
        inputs = {
            "group_ids": [sample.uid for sample in samples],
            "gamma": algorithm.gamma,
            "reward_baselines": None if reward_baselines is None else self._device(reward_baselines),
            "component_weights": self._components(samples),
            "process_group": self._process_group,
            **keyword_arguments(algorithm.estimator_options, parameters),
        }
        return {name: value for name, value in inputs.items() if name in parameters}

    def _components(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Weights of the reward components, without zeros."""
        current = self._reward_weights()
        weights = {name: current.get(name, 1.0) for name in samples[0].reward_components}
        return {name: weight for name, weight in weights.items() if weight}

    def _column_inputs(
        self, rows: Experience, samples: Sequence[Sample], squares: Tensor | None
    ) -> dict[str, Tensor | dict[str, Tensor]]:
        """The estimator's arguments with one number per column, [B, L], as far as its signature names them."""
        parameters, mask, columns = self._algorithm.estimator_parameters, rows.policy_mask, self._columns
        inputs: dict[str, Tensor | dict[str, Tensor]] = {}
        if rows.values is not None:
            inputs["values"] = columns.first(rows.values)
        if "old_log_probs" in parameters:
            inputs["old_log_probs"] = columns.sum(rows.old_log_probs, mask)
        if squares is not None:
            # Tokens are sampled independently, so the sum over joint choices is the product of the per-token sums.
            inputs["sum_pi_squared"] = columns.sum(squares.log(), mask).exp()
        if "rollout_weights" in parameters:
            weights = column_weights(rows, self._correction, columns, self._strategy)
            if weights is not None:
                inputs["rollout_weights"] = weights
        if "component_rewards" in parameters:
            inputs["component_rewards"] = {
                name: columns.of_actions(
                    torch.cat([s.reward_components[name] for s in samples]) / weight, rows.action_mask
                )
                for name, weight in self._components(samples).items()
            }
        return inputs

    def _bootstrap(self, samples: Sequence[Sample]) -> Tensor:
        """[episodes]: the critic's value of the last observation for truncated episodes, 0 for terminated ones."""
        if not self._algorithm.bootstrap_truncated:
            return torch.zeros(len(samples))
        rows = last_observations(samples)
        if self.state_normalizer is not None:
            rows = rows.with_fields(critic_state=self.state_normalizer(self._padded_states(samples, slice(-1, None))))
        values = self._denormalized(self._passes.values(rows)[:, 0])
        return torch.where(torch.tensor([sample.truncated for sample in samples]), values, torch.zeros_like(values))

    # ------------------------------------------------------------------ values
    def _padded_states(self, samples: Sequence[Sample], decisions: slice) -> Tensor:
        """Critic states [B, C] of these decisions of each episode; tasks with shorter ones are padded with zeros."""
        assert self.state_normalizer is not None
        width, states = self.state_normalizer.width, list[Tensor]()
        for sample in samples:
            assert sample.critic_state is not None
            state = sample.critic_state[decisions]
            states.append(torch.nn.functional.pad(state, (0, width - state.shape[1])))
        padded = torch.cat(states)
        if self._algorithm.bootstrap_truncated:
            padded[:, 0] = 0.0  # the value beyond the step limit does not depend on the time (Pardo et al. 2018)
        return padded

    def _denormalized(self, values: Tensor) -> Tensor:
        return values if self.value_normalizer is None else self.value_normalizer.denormalize(values)

    def _normalized(self, rows: Experience, raw_values: Tensor, normalizer: ValueNormalizer) -> Experience:
        """Rows with normalized returns and the critic's raw output, the scale of the value loss."""
        normalizer.update(self._device(rows.returns), self._device(rows.value_mask), self._process_group)
        return rows.with_fields(values=raw_values, returns=normalizer.normalize(rows.returns))

    # ----------------------------------------------------------------- metrics
    def _measure(self, rows: Experience, samples: Sequence[Sample], kl: Tensor, metrics: Metrics) -> None:
        """Metrics over the episodes of all ranks, weighted by their numbers of tokens."""
        tokens, columns = rows.policy_mask, rows.value_mask
        if self._passes.networks.reference is not None:
            metrics.mean({"actor/ref_kl": kl[tokens].mean()}, float(tokens.sum()))
        scores = torch.tensor([sample.score for sample in samples])
        metrics.mean({"reward/total": scores.mean()}, len(samples))
        metrics.distribution("critic/score", scores)
        if self._algorithm.normalize_reward:
            metrics.mean({"reward/normalizer_std": self.reward_scaling.divisor}, 1.0)
        metrics.distribution("critic/advantages", rows.advantages[tokens])
        metrics.distribution("critic/returns", rows.returns[columns])
        if rows.values is not None:
            metrics.distribution("critic/values", rows.values[columns])
            metrics.distribution("_error", (rows.returns - rows.values)[columns])
            metrics.derived("critic/vf_explained_var", explained_variance("critic/returns", "_error"))

"""Optimizer steps of actor and critic, normalized over the whole step.

Losses are divided by the number of valid tokens (or rows) of the optimizer step over all micro-batches and ranks, so
that the update does not depend on the micro-batch size or the number of ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.columns import Columns
from rlvla.algorithms.kl import kl_penalty
from rlvla.algorithms.losses import aggregate_loss, value_loss
from rlvla.algorithms.policy_losses import POLICY_LOSSES
from rlvla.experience import Experience
from rlvla.models.policy import Policy
from rlvla.options import keyword_arguments
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig, OptimizationConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.observers import OptimizerStep
from rlvla.trainer.replay import MicroBatchPlanner, ReplayList, step_sizes
from rlvla.trainer.rollout_correction import Interpolation
from rlvla.trainer.scoring import critic_values
from rlvla.trainer.supervised.demonstration_loss import DemonstrationLoss
from rlvla.utils.bars import progress_bar
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import TrainingHalted
from rlvla.utils.seeding import derive_rng

TRAJECTORY_MODE = "traj-mean-token-mean"
# Largest |ratio - 1| allowed at the first update of an iteration, where old and new policy are the same network.
RATIO_TOLERANCE = 1e-3
# Mean |ratio - 1| allowed there in bfloat16, whose rounding depends on the batch size: those of pi0 are off by 0.01
# (median) and up to 0.4 (docs/gpu.md).
MEAN_RATIO_TOLERANCE = 0.1


class RatioError(TrainingHalted):
    """Old and new log-probs of the same weights differ: their forward passes do not compute the same thing."""


@dataclass(frozen=True)
class StepCounts:
    """Counts of the valid entries of an optimizer step over all ranks.

    Attributes:
        num_tokens: number of valid entries.
        num_rows: number of decisions with a valid entry.
        num_trajectories: number of episodes with a valid entry; None if not needed.
        trajectory_tokens: [B], valid entries of the episode to which each row of this rank belongs; None if not needed.
    """

    num_tokens: float
    num_rows: float
    num_trajectories: float | None = None
    trajectory_tokens: Tensor | None = None


class StepNormalizer:
    """Counts the valid entries of optimizer steps and turns the counts into arguments of the losses.

    Args:
        strategy: sums the counts over ranks.
        mode: aggregation mode, see `rlvla.algorithms.losses.aggregate_loss`.
        horizon: divisor of `seq-mean-token-sum-norm`, or None.
    """

    def __init__(self, strategy: DeepspeedStrategy, mode: str, horizon: float | None = None):
        self._strategy, self._mode, self._horizon = strategy, mode, horizon

    def count(self, mask: Tensor, episodes: Tensor) -> StepCounts:
        """Count the valid entries of a step.

        Args:
            mask: [B, L] bool, all rows of this rank.
            episodes: [B] int64, episode of each row; an episode has the same number on all ranks.
        """
        local_counts = {"tokens": float(mask.sum()), "rows": float(mask.any(-1).sum())}
        sums = self._strategy.all_reduce(local_counts, "sum")
        counts = StepCounts(max(1.0, sums["tokens"]), max(1.0, sums["rows"]))
        if self._mode != TRAJECTORY_MODE:
            return counts
        per_row = mask.sum(-1).tolist()
        local: Counter[int] = Counter()
        for episode, tokens in zip(episodes.tolist(), per_row):
            local[episode] += tokens
        everywhere: Counter[int] = sum(self._strategy.gather_objects(local), Counter())
        trajectory_tokens = torch.tensor([everywhere[episode] for episode in episodes.tolist()], dtype=torch.long)
        return StepCounts(counts.num_tokens, counts.num_rows, max(1.0, float(len(everywhere))), trajectory_tokens)

    def options(self, counts: StepCounts, rows: Tensor, *, own_mode: bool = False) -> dict[str, Any]:
        """Keyword arguments of a loss for one micro-batch.

        Args:
            counts: counts of the step.
            rows: [M] int64, the rows of the step in this micro-batch; empty for a placeholder.
            own_mode: the loss always averages over decisions, regardless of the aggregation mode.
        """
        options: dict[str, Any] = {
            "agg_mode": self._mode,
            "num_tokens": counts.num_tokens,
            "num_sequences": counts.num_rows,
            "dp_size": self._strategy.world_size,
            "horizon": self._horizon,
        }
        if counts.trajectory_tokens is not None and not own_mode:
            tokens = counts.trajectory_tokens[rows] if len(rows) else torch.ones(1, dtype=torch.long)
            options |= {
                "num_sequences": counts.num_trajectories,
                "trajectory_tokens": tokens.to(self._strategy.device),
            }
        return options


def choose_over_ranks(
    strategy: DeepspeedStrategy, choose: Callable[..., Tensor], rows: Sequence[Tensor], options: Mapping[str, Any]
) -> Tensor:
    """Select tokens over all ranks; called on all ranks, with the same result.

    Args:
        strategy: gathers the tensors.
        choose: `select_tokens` of a policy loss.
        rows: tensor arguments of `choose`, [B, L], with all rows of the step on this rank.
        options: keyword arguments of `choose`.

    Returns:
        [B, L] bool on the host: the selected tokens of this rank's rows.
    """
    seed = int(torch.randint(2**62, ()))  # that of rank 0 is used, so that all ranks select the same tokens
    everyone = strategy.gather_objects((seed, [tensor.cpu() for tensor in rows]))
    whole = [torch.cat(of_ranks) for of_ranks in zip(*(tensors for _, tensors in everyone))]
    generator = torch.Generator().manual_seed(everyone[0][0])
    chosen = choose(*whole, generator=generator, **options)
    lengths = [len(tensors[0]) for _, tensors in everyone]
    return chosen.split(lengths)[strategy.rank]


class Updater:
    """Runs the optimizer steps of actor and critic.

    Args:
        strategy: device, and reductions of counts over ranks.
        batch: micro-batch sizes and sampling temperature.
        algorithm: losses and their coefficients.
        policy: gives the number of log-probs per decision and of tokens per row.
        interpolation: finds the old log-probs during the update; None: they are known before.
    """

    def __init__(
        self,
        strategy: DeepspeedStrategy,
        batch: BatchConfig,
        algorithm: AlgorithmConfig,
        policy: Policy,
        interpolation: Interpolation | None = None,
    ):
        self._strategy, self._interpolation = strategy, interpolation
        self._batch = batch
        self._algorithm = algorithm
        self._columns = Columns(algorithm.log_prob_level, policy.spec.columns, policy.spec.columns_per_action)
        self._planner = MicroBatchPlanner(strategy, batch, policy)
        self._normalizer = StepNormalizer(strategy, algorithm.loss_agg_mode, algorithm.loss_horizon)
        self._policy_loss = POLICY_LOSSES.get(algorithm.policy_loss)
        parameters = algorithm.loss_parameters
        self._loss_arguments = keyword_arguments(algorithm.loss_options, parameters)
        if "column_shape" in parameters:
            self._loss_arguments["column_shape"] = policy.spec.column_shape
        self._own_mode = "agg_mode" not in parameters  # always averages over decisions

    def spread(self, step: Experience, metrics: Metrics) -> Experience:
        """Balance the rows of a step over the ranks, if enabled; called before `policy_step` and `value_step`."""
        balanced = self._planner.spread(step)
        self._planner.measure_balance(step, balanced, metrics)
        return balanced

    def _micro_batches(self, step: Experience) -> Iterator[tuple[Experience, Tensor, int, bool]]:
        """Yields (micro-batch on the device, its row indices, number of micro-batches, whether it is the last)."""
        plan = self._planner.plan(step)
        for index, rows in enumerate(plan):
            yield step.take(rows).to(self._strategy.device), rows, len(plan), index == len(plan) - 1

    # ------------------------------------------------------------------ policy
    def policy_step(
        self, engine: Engine, step: Experience, kl_coef: float, metrics: Metrics, *, first_of_iteration: bool
    ) -> float:
        """Take an optimizer step of the policy; measurements are added to `metrics`.

        With a shared backbone the loss is policy loss + vf_coef * value loss.

        Returns:
            The gradient norm; not finite if the step was skipped.

        Raises:
            RatioError: at the first step of an iteration, on every rank, if the probability ratio is not 1 on any rank.
        """
        actor, check_ratio = engine.module, first_of_iteration
        columns = self._columns
        column_counts = self._normalizer.count(columns.any(step.policy_mask), step.episode_index)
        token_counts = self._normalizer.count(step.policy_mask, step.episode_index)
        value_counts = token_counts
        if self._algorithm.share_backbone:
            value_counts = self._normalizer.count(step.value_mask, step.episode_index)
        chosen = self._choose_tokens(engine, step)
        engine.train()
        for micro, rows, count, last in self._micro_batches(step):
            outputs = self._forward(engine, micro)
            new, old, advantages, column_mask = self._on_columns(micro, outputs["log_probs"])
            weights = None if micro.rollout_weights is None else columns.first(micro.rollout_weights)
            if self._interpolation is not None:
                assert micro.staleness is not None
                old, weights = self._interpolation(new.detach(), old, micro.staleness, column_mask, metrics)
            elif check_ratio:
                self._check_ratio(new, old, column_mask, next(actor.parameters()).dtype)
                check_ratio = False
            loss, measured = self._policy_loss(
                new,
                old,
                advantages,
                column_mask,
                rollout_weights=weights,
                **chosen(rows),
                **self._loss_arguments,
                **self._normalizer.options(column_counts, rows, own_mode=self._own_mode),
            )
            metrics.mean({f"actor/{name}": value for name, value in measured.items()}, float(column_mask.sum()))
            self._add_loss(metrics, "actor/pg_loss", loss, count)
            options = self._normalizer.options(token_counts, rows)
            loss = loss + self._penalties(micro, outputs, options, kl_coef, metrics, count)
            if "values" in outputs:
                options = self._normalizer.options(value_counts, rows)
                value_loss = self._value_loss(outputs["values"], micro, options, metrics, count)
                loss = loss + self._algorithm.vf_coef * value_loss
            norm = engine.backward(loss, last=last)
        return self._measured_norm("actor", norm, metrics)

    def _choose_tokens(self, engine: Engine, step: Experience) -> Callable[[Tensor], dict[str, Tensor]]:
        """Select the tokens that the loss treats differently, over the whole step, after a pass without gradients.

        Returns:
            A function from the row indices of a micro-batch to the extra argument of its loss, if there is one.
        """
        select = POLICY_LOSSES.attribute(self._algorithm.policy_loss, "select_tokens")
        if select is None:
            return lambda rows: {}
        engine.train(False)
        log_probs = torch.zeros(step.action_mask.shape)
        with torch.no_grad():
            for micro, rows, _, _ in self._micro_batches(step):
                inputs = engine.module.score(micro, self._batch.temperature)
                log_probs[rows] = engine(**inputs, wants=("log_probs",))["log_probs"][: len(rows)].cpu()
        chosen = choose_over_ranks(self._strategy, select, self._on_columns(step, log_probs), self._loss_arguments)
        blank = torch.zeros_like(chosen[:1])
        return lambda rows: {"chosen": (chosen[rows] if len(rows) else blank).to(self._strategy.device)}

    def _forward(self, engine: Engine, micro: Experience) -> dict[str, Tensor]:
        """Forward pass of the policy; returns `log_probs` and, where available or used, `entropy`, `kl`, `values`."""
        policy: Policy = engine.module
        wants = ["log_probs"]
        if "entropy" not in policy.spec.missing:
            wants.append("entropy")
        if micro.reference is not None:
            wants.append("kl")
        if self._algorithm.share_backbone:
            wants.append("values")
        return engine(**policy.score(micro, self._batch.temperature), wants=wants, reference=micro.reference)

    def _penalties(
        self,
        micro: Experience,
        outputs: dict[str, Tensor],
        options: dict[str, Any],
        kl_coef: float,
        metrics: Metrics,
        count: int,
    ) -> Tensor | float:
        """Entropy bonus and KL loss, both aggregated by the mode of the run."""
        options, mask = dict(options), micro.policy_mask
        weight, mode = float(mask.sum()), options.pop("agg_mode")
        total: Tensor | float = 0.0
        if "entropy" in outputs:
            entropy = outputs["entropy"]
            metrics.mean({"actor/entropy": entropy[mask].detach().mean()}, weight)
            if self._algorithm.entropy_loss_coef:
                total = total - self._algorithm.entropy_loss_coef * aggregate_loss(entropy, mask, mode, **options)
        if self._algorithm.kl_in_loss:
            if "kl" in outputs:
                kl = outputs["kl"]
            else:
                assert micro.ref_log_probs is not None
                kl = kl_penalty(outputs["log_probs"], micro.ref_log_probs, self._algorithm.kl_estimator, mask)
            kl_loss = aggregate_loss(kl, mask, mode, **options)
            self._add_loss(metrics, "actor/kl_loss", kl_loss, count)
            total = total + kl_coef * kl_loss
        return total

    @staticmethod
    def _add_loss(metrics: Metrics, name: str, loss: Tensor, count: int) -> None:
        """Record the loss of a micro-batch: summed over a step, averaged over steps and ranks."""
        metrics.mean({name: loss.detach() * count}, 1.0 / count)

    def _check_ratio(self, new: Tensor, old: Tensor, mask: Tensor, dtype: torch.dtype) -> None:
        in_bf16 = dtype == torch.bfloat16
        tolerance = MEAN_RATIO_TOLERANCE if in_bf16 else RATIO_TOLERANCE
        distances = (new.detach() - old)[mask].exp().sub(1).abs()
        local = float(distances.mean() if in_bf16 else distances.max()) if len(distances) else 0.0
        # The maximum over ranks, so that all of them stop together; NaN might get lost in it.
        local = math.inf if math.isnan(local) else local
        deviation = self._strategy.all_reduce({"deviation": local}, "max")["deviation"]
        if deviation > tolerance:
            raise RatioError(
                f"at the first update of an iteration the probability ratio must be 1, but it is off by {deviation:.2g}"
                f"{' on average' if in_bf16 else ''} (tolerance {tolerance:g} for {dtype}). The forward pass of the "
                "update differs from the one that gave the old log-probs: look for dropout, a different temperature or "
                "preprocessing, or lower precision."
            )

    def _on_columns(self, rows: Experience, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first four arguments of a policy loss, all [B, L]: new and old log-probs, advantages, mask."""
        columns, mask = self._columns, rows.policy_mask
        new, old = columns.sum(log_probs, mask), columns.sum(rows.old_log_probs, mask)
        return new, old, columns.first(rows.advantages), columns.any(mask)

    # ------------------------------------------------------------------- value
    def value_step(self, engine: Engine, step: Experience, metrics: Metrics) -> float:
        """Take an optimizer step of the critic; see `policy_step`."""
        counts = self._normalizer.count(step.value_mask, step.episode_index)
        engine.train()
        for micro, rows, count, last in self._micro_batches(step):
            options = self._normalizer.options(counts, rows)
            loss = self._value_loss(critic_values(engine, micro), micro, options, metrics, count)
            norm = engine.backward(loss, last=last)
        return self._measured_norm("critic", norm, metrics)

    @staticmethod
    def _measured_norm(model: str, norm: float | None, metrics: Metrics) -> float:
        """The gradient norm after the last micro-batch of a step, which is recorded."""
        assert norm is not None
        metrics.mean({f"{model}/grad_norm": norm}, float(math.isfinite(norm)))
        return norm

    def _value_loss(
        self, values: Tensor, micro: Experience, options: dict[str, Any], metrics: Metrics, count: int
    ) -> Tensor:
        assert micro.values is not None and micro.returns is not None and micro.value_mask is not None
        clip = self._algorithm.value_clip or None
        loss, measured = value_loss(values, micro.values, micro.returns, micro.value_mask, clip=clip, **options)
        metrics.mean({f"critic/{name}": value for name, value in measured.items()}, float(micro.value_mask.sum()))
        self._add_loss(metrics, "critic/vf_loss", loss, count)
        return loss


@dataclass
class UpdatePhase:
    """Trains actor and critic on the experience of an iteration.

    Attributes:
        strategy: used to agree on the episodes of each step over ranks.
        batch: episodes per step and epochs per iteration.
        optimization: `freezing_actor_steps` and `target_kl`.
        updater: runs the optimizer steps.
        actor: engine of the actor, frozen for the first `freezing_actor_steps` iterations.
        critic: engine of the critic; None if there is none or it shares the actor's network.
        after_step: called for each optimizer step.
        demonstrations: supervised loss added to each step of the actor, or None.
    """

    strategy: DeepspeedStrategy
    batch: BatchConfig
    optimization: OptimizationConfig
    updater: Updater
    actor: Engine
    critic: Engine | None
    after_step: Callable[[OptimizerStep], None]
    demonstrations: DemonstrationLoss | None = None

    def run(self, iteration: int, replay: ReplayList, kl_coef: float, metrics: Metrics) -> None:
        """Run all epochs of an iteration (counted from 0) over the replay list; measurements are added to `metrics`.

        Once `actor/ppo_kl` of a step over all ranks exceeds `target_kl`, or is not finite, the policy is no longer
        trained in this iteration; a separate critic is.
        """
        batch = self.batch
        episodes = self.strategy.gather_objects(replay.num_episodes)
        sizes = step_sizes(episodes, batch.train_batch_size)[self.strategy.rank]
        target_kl = self.optimization.target_kl
        train_actor, first = iteration >= self.optimization.freezing_actor_steps, True
        phase = f"iteration {iteration + 1}/{batch.iterations} update"
        with progress_bar(batch.max_epochs * len(sizes), phase, enabled=self.strategy.is_main) as bar:
            for epoch in range(batch.max_epochs):
                rng = derive_rng(self.strategy.seed, "update", iteration, epoch, self.strategy.rank)
                for number, step in enumerate(replay.optimizer_steps(sizes, rng)):
                    step, update_actor = self.updater.spread(step, metrics), train_actor
                    if update_actor:
                        kl = self._policy_step((iteration, epoch, number), step, kl_coef, metrics, first)
                        train_actor = target_kl is None or (math.isfinite(kl) and kl <= target_kl)
                    if self.critic is not None:
                        norm = self.updater.value_step(self.critic, step, metrics)
                        counts = not update_actor
                        self._done(OptimizerStep("critic", self.critic, norm, step, iteration, metrics, counts=counts))
                    first = False
                    bar.update(1)

    def _done(self, step: OptimizerStep) -> None:
        """Count a skipped step, and report the step to `after_step`."""
        if not math.isfinite(step.norm):
            step.metrics.total({f"{step.model}/skipped_steps": 1.0 / self.strategy.world_size})
        self.after_step(step)

    def _policy_step(
        self, key: tuple[int, int, int], step: Experience, kl_coef: float, metrics: Metrics, first: bool
    ) -> float:
        """One step of the actor, with `key` = (iteration, epoch, number); returns its `actor/ppo_kl` in nats."""
        if self.demonstrations is not None:
            self.demonstrations.accumulate(self.actor, key, metrics)
        before = metrics.so_far("actor/ppo_kl")
        norm = self.updater.policy_step(self.actor, step, kl_coef, metrics, first_of_iteration=first)
        self._done(OptimizerStep("actor", self.actor, norm, step, key[0], metrics))
        if math.isfinite(norm):
            metrics.total({"actor/optimizer_steps": 1.0 / self.strategy.world_size})
        if self.optimization.target_kl is None:
            return 0.0
        after = metrics.so_far("actor/ppo_kl")
        local = {"kl": after[0] - before[0], "tokens": after[1] - before[1]}
        sums = self.strategy.all_reduce(local, "sum")
        return sums["kl"] / max(1.0, sums["tokens"])

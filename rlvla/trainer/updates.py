"""One optimiser step of the actor and of the critic, normalised by the counts of the whole step.

Every loss is divided by the number of valid tokens (or rows) of the optimiser step over all micro-batches and ranks, so
that equal data gives an equal update for any micro-batch size and any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlvla.algorithms.kl import kl_penalty
from rlvla.algorithms.losses import aggregate_loss, value_loss
from rlvla.algorithms.policy_losses import get_policy_loss
from rlvla.algorithms.policy_losses.covariance import TOKEN_CHOICES
from rlvla.experience import Experience
from rlvla.models.inputs import VLAInputs
from rlvla.trainer.config import AlgorithmConfig, BatchConfig
from rlvla.trainer.levels import any_of_column, first_of_column, sum_columns, tokens_per_column
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.micro_batching import MicroBatchPlanner
from rlvla.trainer.normalizer import StepNormalizer
from rlvla.trainer.replay import take
from rlvla.trainer.token_choice import choose_over_ranks
from rlvla.utils.errors import TrainingHalted
from rlvla.utils.strategy import DeepspeedStrategy, Engine

# Largest |ratio - 1| at the first update of an iteration, where old and new policy are the same network.
RATIO_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


class RatioError(TrainingHalted):
    """Old and new log-probs of the same weights differ: training and rollout do not compute the same thing."""


class Updater:
    """Runs optimiser steps.

    Args:
        strategy: collectives.
        batch: micro-batches and temperature.
        algorithm: losses and coefficients.
        action_dim: D.
        inputs: of the actor; they tell how many tokens a row has.
    """

    def __init__(
        self,
        strategy: DeepspeedStrategy,
        batch: BatchConfig,
        algorithm: AlgorithmConfig,
        action_dim: int,
        inputs: VLAInputs,
    ):
        self._strategy = strategy
        self._batch = batch
        self._algorithm = algorithm
        self._action_dim = action_dim
        self._planner = MicroBatchPlanner(strategy, batch, inputs)
        self._normalizer = StepNormalizer(strategy, algorithm.loss_agg_mode, algorithm.loss_horizon)
        self._policy_loss = get_policy_loss(algorithm.policy_loss)
        self._loss_arguments = self._loss_options()
        self._own_mode = "agg_mode" not in algorithm.loss_options  # averages over decisions, whatever the mode

    def spread(self, step: Experience) -> Experience:
        """The step with its rows balanced over the ranks, if that is on; to be called before its policy and value."""
        return self._planner.spread(step)

    def _micro_batches(self, step: Experience) -> Iterator[tuple[Experience, Tensor, int, bool]]:
        """(micro-batch on the device, its row numbers, number of micro-batches, whether it is the last)."""
        plan = self._planner.plan(step)
        for index, rows in enumerate(plan):
            yield take(step, rows).to(self._strategy.device), rows, len(plan), index == len(plan) - 1

    # ------------------------------------------------------------------ policy
    def policy_step(
        self, engine: Engine, step: Experience, kl_coef: float, metrics: Metrics, *, first_of_iteration: bool
    ) -> float:
        """Accumulate the policy gradient of a step and apply it; measurements go to `metrics`.

        With a shared backbone the loss is that of the policy + vf_coef * that of the value.

        Returns:
            The norm of the gradient; if it is not finite, the step was left out.

        Raises:
            RatioError: on every rank, at the first step of an iteration, if the probability ratio is not 1 on any.
        """
        actor, check_ratio = engine.module, first_of_iteration
        width = tokens_per_column(self._algorithm.log_prob_level, step.action_mask.shape[1], self._action_dim)
        column_counts = self._normalizer.count(any_of_column(step.policy_mask, width), step.episode_index)
        token_counts = self._normalizer.count(step.policy_mask, step.episode_index)
        value_counts = token_counts
        if self._algorithm.share_backbone:
            value_counts = self._normalizer.count(step.value_mask, step.episode_index)
        chosen = self._choose_tokens(engine, step, width)
        engine.train()
        for micro, rows, count, last in self._micro_batches(step):
            log_probs, entropy, every, values = self._forward(engine, micro)
            new, old, advantages, column_mask = _columns(micro, log_probs, width)
            if check_ratio:
                self._check_ratio(new, old, column_mask, next(actor.parameters()).dtype)
                check_ratio = False
            weights = None if micro.rollout_weights is None else first_of_column(micro.rollout_weights, width)
            loss, found = self._policy_loss(
                new,
                old,
                advantages,
                column_mask,
                rollout_weights=weights,
                **chosen(rows),
                **self._loss_arguments,
                **self._normalizer.options(column_counts, rows, own_mode=self._own_mode),
            )
            metrics.mean({f"actor/{name}": value for name, value in found.items()}, float(column_mask.sum()))
            self._add_up(metrics, "actor/pg_loss", loss, count)
            options = self._normalizer.options(token_counts, rows)
            loss = loss + self._penalties(micro, (log_probs, entropy, every), options, kl_coef, metrics, count)
            if values is not None:
                options = self._normalizer.options(value_counts, rows)
                loss = loss + self._algorithm.vf_coef * self._value_loss(values, micro, options, metrics, count)
            norm = engine.backward(loss, last=last)
        metrics.mean({"actor/grad_norm": norm}, float(math.isfinite(norm)))
        return norm

    def _choose_tokens(self, engine: Engine, step: Experience, width: int) -> Callable[[Tensor], dict[str, Tensor]]:
        """Tokens that the loss treats apart, chosen over the whole step after a pass without gradients.

        Returns:
            From row numbers of a micro-batch to the argument of its loss; no argument where all tokens are alike.
        """
        choose = TOKEN_CHOICES.get(self._algorithm.policy_loss)
        if choose is None:
            return lambda rows: {}
        engine.train(False)
        log_probs = torch.zeros(step.action_mask.shape)
        with torch.no_grad():
            for micro, rows, _, _ in self._micro_batches(step):
                found = engine(**engine.module.score(micro, self._batch.temperature))[0]
                log_probs[rows] = found[: len(rows)].cpu()
        columns = _columns(step, log_probs, width)
        chosen = choose_over_ranks(self._strategy, choose, columns, self._loss_arguments)
        blank = torch.zeros_like(chosen[:1])
        return lambda rows: {"chosen": (chosen[rows] if len(rows) else blank).to(self._strategy.device)}

    def _loss_options(self) -> dict[str, Any]:
        """The arguments of the policy loss; those that its signature does not name are left out."""
        algorithm = self._algorithm
        offered = {
            "clip_low": algorithm.clip[0],
            "clip_high": algorithm.clip[1],
            "clip_dual": algorithm.eps_clip_dual,
            "tau_pos": algorithm.tau_pos,
            "tau_neg": algorithm.tau_neg,
            "beta": algorithm.beta,
            "cov_ratio": algorithm.cov_ratio,
            "cov_low": algorithm.cov_low,
            "cov_high": algorithm.cov_high,
            "kl_coef": algorithm.kl_cov_coef,
        }
        return {name: value for name, value in offered.items() if name in algorithm.loss_options}

    def _forward(self, engine: Engine, micro: Experience) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What the policy says of the rows.

        Returns:
            Log-probs and entropies [B, T]; with the exact KL as a loss the log-probs [B, T, 256] of all ids; with a
            shared backbone values [B, T].
        """
        inputs, values = engine.module.score(micro, self._batch.temperature), None
        exact = micro.ref_all_log_probs is not None
        if exact:
            inputs["all_columns"] = True
        if self._algorithm.share_backbone:
            output, values = engine(**inputs, values="also")
        else:
            output = engine(**inputs)
        if not exact:
            return *output, None, values
        chosen = output.gather(-1, micro.action_tokens.unsqueeze(-1)).squeeze(-1)
        return chosen, -(output.exp() * output).sum(-1), output, values

    def _penalties(
        self,
        micro: Experience,
        outputs: tuple[Tensor, Tensor, Tensor | None],
        options: dict[str, Any],
        kl_coef: float,
        metrics: Metrics,
        count: int,
    ) -> Tensor | float:
        """Entropy bonus and KL loss, both aggregated by the mode of the run."""
        log_probs, entropy, every = outputs
        options, mask = dict(options), micro.policy_mask
        weight, mode = float(mask.sum()), options.pop("agg_mode")
        metrics.mean({"actor/entropy": entropy[mask].detach().mean()}, weight)
        total: Tensor | float = 0.0
        if self._algorithm.entropy_loss_coef:
            total = total - self._algorithm.entropy_loss_coef * aggregate_loss(entropy, mask, mode, **options)
        if self._algorithm.kl_in_loss:
            if every is not None:
                kl = kl_penalty(every, micro.ref_all_log_probs, "full", mask)
            else:
                kl = kl_penalty(log_probs, micro.ref_log_probs, self._algorithm.kl_estimator, mask)
            kl_loss = aggregate_loss(kl, mask, mode, **options)
            self._add_up(metrics, "actor/kl_loss", kl_loss, count)
            total = total + kl_coef * kl_loss
        return total

    @staticmethod
    def _add_up(metrics: Metrics, name: str, loss: Tensor, count: int) -> None:
        """Losses of the micro-batches of a step add up to that of the step, which is averaged over steps and ranks."""
        metrics.mean({name: loss.detach() * count}, 1.0 / count)

    def _check_ratio(self, new: Tensor, old: Tensor, mask: Tensor, dtype: torch.dtype) -> None:
        own = float((new.detach() - old)[mask].exp().sub(1).abs().max()) if bool(mask.any()) else 0.0
        # All ranks judge the largest: one that stopped alone would leave the others waiting. A maximum may lose NaN.
        own = math.inf if math.isnan(own) else own
        deviation = self._strategy.all_reduce({"deviation": own}, "max")["deviation"]
        tolerance = RATIO_TOLERANCE.get(dtype, 1e-3)
        if deviation > tolerance:
            raise RatioError(
                "at the first update of an iteration the probability ratio must be 1, but it is off by "
                f"{deviation:.2g} (tolerance {tolerance:g} for {dtype}). The forward pass of the update differs from "
                "the one that gave the old log-probs: look for dropout, a different temperature or preprocessing, or "
                "lower precision."
            )

    # ------------------------------------------------------------------- value
    def value_step(self, engine: Engine, step: Experience, metrics: Metrics) -> float:
        """As `policy_step`, for the critic."""
        critic, counts = engine.module, self._normalizer.count(step.value_mask, step.episode_index)
        engine.train()
        for micro, rows, count, last in self._micro_batches(step):
            options = self._normalizer.options(counts, rows)
            loss = self._value_loss(engine(**critic.score(micro)), micro, options, metrics, count)
            norm = engine.backward(loss, last=last)
        metrics.mean({"critic/grad_norm": norm}, float(math.isfinite(norm)))
        return norm

    def _value_loss(
        self, values: Tensor, micro: Experience, options: dict[str, Any], metrics: Metrics, count: int
    ) -> Tensor:
        clip = self._algorithm.value_clip or None
        loss, found = value_loss(values, micro.values, micro.returns, micro.value_mask, clip=clip, **options)
        metrics.mean({f"critic/{name}": value for name, value in found.items()}, float(micro.value_mask.sum()))
        self._add_up(metrics, "critic/vf_loss", loss, count)
        return loss


def _columns(rows: Experience, log_probs: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first arguments of a policy loss, all [B, L]: new and old log-probs, advantages, mask."""
    return (
        sum_columns(log_probs, rows.policy_mask, width),
        sum_columns(rows.old_log_probs, rows.policy_mask, width),
        first_of_column(rows.advantages, width),
        any_of_column(rows.policy_mask, width),
    )

"""Flags of a run that plays while it trains (`--async_rollout`): what follows from them, and their checks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlvla.algorithms.policy_losses.covariance import TOKEN_CHOICES
from rlvla.commands.problem_texts import problem, unread
from rlvla.trainer.algorithm import Algorithm
from rlvla.trainer.algorithm_config import AUTO, LEARNERS, CorrectionConfig, learner_scores
from rlvla.trainer.config import AsyncConfig
from rlvla.utils.cli.flags import as_typed
from rlvla.utils.errors import Problem

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun


def correction_of(flags: PPORun) -> CorrectionConfig:
    """The correction with what --rollout_is auto stands for: with decisions of older weights icepop, else none."""
    if flags.correction.rollout_is != AUTO:
        return flags.correction
    weighted = flags.asynchronous.plays_ahead and learner_scores(flags.algorithm) in ("log_probs", "step_log_probs")
    chosen = {"rollout_is": "icepop", "rollout_is_low": 0.2, "rollout_is_high": 5.0} if weighted else {}
    return replace(flags.correction, **({"rollout_is": "none"} | chosen))


def async_problems(flags: PPORun) -> list[Problem]:
    """Settings that have no effect, or with which nothing can be played while the policy is trained."""
    config, problems = flags.asynchronous, []
    given = {name: getattr(config, name) for name in ("max_staleness", "partial_rollout", "proximal", "min_ess")}
    typed = {name: as_typed(name, v) for name, v in given.items() if v != getattr(AsyncConfig(), name)}
    if not config.async_rollout:
        return [unread(name, text, "switch", switch="async_rollout") for name, text in typed.items()]
    if not config.plays_ahead:
        return [unread(name, text, "not ahead") for name, text in typed.items() if name != "max_staleness"]
    name, algorithm = flags.algorithm.algorithm, LEARNERS.get(flags.algorithm.algorithm)
    if algorithm.plan_ahead is Algorithm.plan_ahead:
        problems.append(problem("async_rollout", "unsupported", value=name))
    if flags.optimization.offload_during_rollout:
        problems.append(problem("async_rollout", "contradiction", other="--offload_during_rollout"))
    if flags.rewards.reward_schedule and "component_rewards" in flags.algorithm.estimator_options:
        estimator = f"--advantage_estimator {flags.algorithm.advantage_estimator}"
        problems.append(problem("reward_schedule", "contradiction", estimator=estimator))
    if flags.rollout.deterministic_rollout and (config.partial_rollout or config.max_staleness > 1):
        other = "--partial_rollout" if config.partial_rollout else f"--max_staleness {config.max_staleness}"
        problems.append(problem("deterministic_rollout", "contradiction", other=other))
    if config.proximal == "interpolate":
        problems += _interpolation_problems(flags)
    return problems


def _interpolation_problems(flags: PPORun) -> list[Problem]:
    """What needs log-probs of the policy before the update, over all decisions of the iteration."""
    algorithm, correction, value = flags.algorithm, flags.correction, flags.asynchronous.proximal
    if learner_scores(algorithm) not in ("log_probs", "step_log_probs"):
        loss = f"--policy_loss {algorithm.policy_loss}" if algorithm.algorithm == "ppo" else "--algorithm nft"
        return [problem("proximal", "unsupported", value=value, loss=loss)]
    options = {"rollout_weights", "sum_pi_squared", "old_log_probs"} & set(algorithm.estimator_options)
    needs = {
        f"--advantage_estimator {algorithm.advantage_estimator}": bool(options),
        f"--policy_loss {algorithm.policy_loss}": algorithm.policy_loss in TOKEN_CHOICES,
        "--share_backbone": algorithm.share_backbone,
        "--init_kl_coef": bool(algorithm.init_kl_coef),
        "--target_kl": flags.optimization.target_kl is not None,
        "--rollout_is_batch_normalize": correction.rollout_is_batch_normalize,
        "--rollout_rs": correction.rollout_rs != "none",
    }
    return [problem("proximal", "contradiction", value=value, other=flag) for flag, wanted in needs.items() if wanted]

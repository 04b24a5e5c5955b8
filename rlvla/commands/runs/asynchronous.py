"""Flags of asynchronous rollouts (`--async_rollout`): resolution of defaults, and checks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlvla.algorithms.policy_losses import POLICY_LOSSES
from rlvla.trainer.algorithm import Algorithm
from rlvla.trainer.algorithm_config import AUTO, LEARNERS, CorrectionConfig, learner_scores
from rlvla.trainer.config import AsyncConfig
from rlvla.utils.cli.flags import as_typed
from rlvla.utils.errors import Problem

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun


def correction_of(flags: PPORun) -> CorrectionConfig:
    """The correction with --rollout_is auto resolved: icepop if decisions of older weights are trained on, else none."""
    if flags.correction.rollout_is != AUTO:
        return flags.correction
    if flags.asynchronous.plays_ahead and learner_scores(flags.algorithm) in ("log_probs", "step_log_probs"):
        return replace(flags.correction, rollout_is="icepop", rollout_is_low=0.2, rollout_is_high=5.0)
    return replace(flags.correction, rollout_is="none")


def async_problems(flags: PPORun) -> list[Problem]:
    """Settings that have no effect, or with which nothing can be played while the policy is trained."""
    config, problems = flags.asynchronous, []
    if not config.plays_ahead:
        return []
    name, algorithm = flags.algorithm.algorithm, LEARNERS.get(flags.algorithm.algorithm)
    if algorithm.plan_ahead is Algorithm.plan_ahead:
        text = (
            f"--async_rollout: --algorithm {name} does not say what to play ahead "
            "(`Algorithm.plan_ahead`); leave it out"
        )
        problems.append(Problem("async_rollout", "unsupported", text))
    if flags.optimization.offload_during_rollout:
        text = (
            "--async_rollout plays and trains at the same time, and --offload_during_rollout takes turns; leave one out"
        )
        problems.append(Problem("async_rollout", "contradiction", text))
    if flags.rewards.reward_schedule and "component_rewards" in flags.algorithm.estimator_parameters:
        estimator = f"--advantage_estimator {flags.algorithm.advantage_estimator}"
        text = (
            "--reward_schedule changes the weights while episodes of other iterations are trained on, and"
            f" {estimator} divides by them; leave out --async_rollout or the schedule"
        )
        problems.append(Problem("reward_schedule", "contradiction", text))
    if flags.rollout.deterministic_rollout and (config.partial_rollout or config.max_staleness > 1):
        other = "--partial_rollout" if config.partial_rollout else f"--max_staleness {config.max_staleness}"
        text = f"--deterministic_rollout: with {other} it depends on timing which weights decide; leave one out"
        problems.append(Problem("deterministic_rollout", "contradiction", text))
    if config.proximal == "interpolate":
        problems += _interpolation_problems(flags)
    return problems


def _interpolation_problems(flags: PPORun) -> list[Problem]:
    """Settings that need a forward pass of the policy over all decisions before the update."""
    algorithm, correction, value = flags.algorithm, flags.correction, flags.asynchronous.proximal
    if learner_scores(algorithm) not in ("log_probs", "step_log_probs"):
        loss = f"--policy_loss {algorithm.policy_loss}" if algorithm.algorithm == "ppo" else "--algorithm nft"
        return [
            Problem("proximal", "unsupported", f"--proximal {value}: {loss} takes no ratio of log-probs; leave it out")
        ]
    options = {"rollout_weights", "sum_pi_squared", "old_log_probs"} & set(algorithm.estimator_parameters)
    select = POLICY_LOSSES.attribute(algorithm.policy_loss, "select_tokens")
    needs = {
        f"--advantage_estimator {algorithm.advantage_estimator}": bool(options),
        f"--policy_loss {algorithm.policy_loss}": select is not None,
        "--share_backbone": algorithm.share_backbone,
        "--init_kl_coef": bool(algorithm.init_kl_coef),
        "--target_kl": flags.optimization.target_kl is not None,
        "--desired_kl": flags.optimization.desired_kl is not None,
        "--rollout_is_batch_normalize": correction.rollout_is_batch_normalize,
        "--rollout_rs": correction.rollout_rs != "none",
    }
    return [
        Problem(
            "proximal",
            "contradiction",
            (f"--proximal {value} makes no pass of the policy before the update, and {flag} needs one; leave one out"),
        )
        for flag, needs_pass in needs.items()
        if needs_pass
    ]

"""Checks that the flags of a command fit the action distribution of its policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlvla.commands.problem_texts import problem, unread
from rlvla.models.policy import PolicySpec
from rlvla.trainer.algorithm_config import (
    AlgorithmConfig,
    learner_needs_critic,
    learner_needs_reference,
    learner_scores,
)
from rlvla.trainer.config import LoggingConfig
from rlvla.trainer.supervised.config import SFTConfig
from rlvla.utils.cli.flags import as_typed
from rlvla.utils.errors import Problem

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun

# What a policy loss or learner trains on, by `PolicySpec.scores` -> the policies that give it.
_SCORED_BY = {
    "step_log_probs": "it needs a flow-matching policy whose denoising steps are all noisy: --flow_noisy_steps all",
    "matching": "it needs a flow-matching policy without noise in its steps: --flow_method ode",
    "mirrored": "it needs a flow-matching policy with --flow_method sde or cps",
}
_NO_LEVEL = "only flow-matching policies with --flow_method sde or cps have a noise level"
# Losses that compare probabilities rather than densities.
PROBABILITY_LOSSES = ("dppo_tv", "dppo_kl")
# Losses that select tokens by their covariance, to keep the entropy up.
COVARIANCE_LOSSES = ("clip_cov", "kl_cov")


def quantity_problems(spec: PolicySpec, algorithm: AlgorithmConfig) -> list[Problem]:
    """Flags that need a quantity the policy does not have (`PolicySpec.missing`), each with the reason."""
    needs_critic = learner_needs_critic(algorithm)
    needed = [
        ("entropy_loss_coef", "entropy", bool(algorithm.entropy_loss_coef)),
        ("kl_estimator", "kl", algorithm.exact_kl and learner_needs_reference(algorithm)),
        ("advantage_estimator", "sum_pi_squared", "sum_pi_squared" in algorithm.estimator_options),
        ("advantage_estimator", "critic", needs_critic and not algorithm.share_backbone),
        ("share_backbone", "value_head", needs_critic and algorithm.share_backbone),
        ("policy_loss", "covariances", algorithm.policy_loss in COVARIANCE_LOSSES),
        ("policy_loss", "probabilities", algorithm.policy_loss in PROBABILITY_LOSSES),
    ]
    return [
        problem(flag, "mismatch", value=getattr(algorithm, flag), why=spec.missing[quantity])
        for flag, quantity, wanted in needed
        if wanted and quantity in spec.missing
    ]


def score_problems(spec: PolicySpec, algorithm: AlgorithmConfig) -> list[Problem]:
    """A policy loss or learner that trains on other numbers than the policy gives (`PolicySpec.scores`)."""
    wanted = learner_scores(algorithm)
    if wanted in (None, spec.scores):
        return []
    if wanted == "log_probs":  # only a policy without noise gives none
        return [problem("flow_method", "needs_flag", loss=algorithm.policy_loss)]
    flag = "policy_loss" if algorithm.algorithm == "ppo" else "algorithm"
    return [problem(flag, "needs_flag", value=getattr(algorithm, flag), why=_SCORED_BY[wanted])]


def density_problems(spec: PolicySpec, flags: PPORun) -> list[Problem]:
    """Flags that compare log-probs, or scale noise, where the policy has none, each with the reason."""
    algorithm, correction = flags.algorithm, flags.correction
    estimated_kl = bool(algorithm.init_kl_coef) and not algorithm.exact_kl and learner_needs_reference(algorithm)
    needed = [
        ("kl_estimator", "densities", algorithm.kl_estimator, estimated_kl),
        ("target_kl", "densities", flags.optimization.target_kl, flags.optimization.target_kl is not None),
        ("rollout_is", "densities", correction.rollout_is, correction.weighs),
        ("rollout_rs", "densities", correction.rollout_rs, correction.rollout_rs != "none"),
        ("temperature", "temperature", flags.batch.temperature, flags.batch.temperature != 1.0),
    ]
    problems = untrainable(spec.missing)
    if flags.batch.flow_noise_level_end is not None and not spec.anneals_noise:
        level = flags.batch.flow_noise_level_end
        problems.append(problem("flow_noise_level_end", "mismatch", value=level, why=_NO_LEVEL))
    return problems + [
        problem(flag, "mismatch", value=value, why=spec.missing[quantity])
        for flag, quantity, value, wanted in needed
        if wanted and quantity in spec.missing
    ]


def untrainable(missing: Mapping[str, str]) -> list[Problem]:
    """A policy that no stored decisions can train; `missing` as in `PolicySpec`."""
    return [problem("pretrain", "mismatch", why=missing["training"])] if "training" in missing else []


def supervision_problems(missing: Mapping[str, str], config: SFTConfig) -> list[Problem]:
    """Settings of a supervised loss that the policy does not have; `missing` as in `PolicySpec`."""
    problems = untrainable(missing)
    if config.label_smoothing and "label_smoothing" in missing:
        problems.append(problem("label_smoothing", "mismatch", why=missing["label_smoothing"]))
    if config.sft_loss is not None and "sft_loss" in missing:
        problems.append(problem("sft_loss", "mismatch", why=missing["sft_loss"]))
    return problems


def wandb_problems(config: LoggingConfig) -> list[Problem]:
    """Settings of Weights & Biases that nothing reads."""
    return [
        unread(f"wandb_{name}", as_typed(f"wandb_{name}", value), "switch", switch="use_wandb")
        for name, value in config.wandb_run.items()
        if value is not None and not config.use_wandb
    ]

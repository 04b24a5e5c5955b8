"""Checks that the flags of a command fit the action distribution of its policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlvla.algorithms.policy_losses import POLICY_LOSSES
from rlvla.models.policy import PolicySpec
from rlvla.trainer.algorithm_config import (
    AlgorithmConfig,
    learner_needs_critic,
    learner_needs_reference,
    learner_scores,
)
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


def quantity_problems(spec: PolicySpec, algorithm: AlgorithmConfig) -> list[Problem]:
    """Flags that need a quantity the policy does not have (`PolicySpec.missing`), each with the reason."""
    needs_critic = learner_needs_critic(algorithm)
    needed = [
        ("entropy_loss_coef", "entropy", bool(algorithm.entropy_loss_coef)),
        ("kl_estimator", "kl", algorithm.exact_kl and learner_needs_reference(algorithm)),
        ("advantage_estimator", "sum_pi_squared", "sum_pi_squared" in algorithm.estimator_parameters),
        ("advantage_estimator", "critic", needs_critic and not algorithm.share_backbone),
        ("share_backbone", "value_head", needs_critic and algorithm.share_backbone),
        *(("policy_loss", quantity, True) for quantity in POLICY_LOSSES.attribute(algorithm.policy_loss, "needs")),
    ]
    return [
        Problem(flag, "mismatch", f"{as_typed(flag, getattr(algorithm, flag))}: {spec.missing[quantity]}; leave it out")
        for flag, quantity, wanted in needed
        if wanted and quantity in spec.missing
    ]


def score_problems(spec: PolicySpec, algorithm: AlgorithmConfig) -> list[Problem]:
    """A policy loss or learner that trains on other numbers than the policy gives (`PolicySpec.scores`)."""
    wanted = learner_scores(algorithm)
    if wanted in (None, spec.scores):
        return []
    if wanted == "log_probs":  # only a policy without noise gives none
        text = (
            f"--flow_method ode samples without noise, so that --policy_loss {algorithm.policy_loss} has "
            "no probabilities to compare; give --policy_loss fpo, or another --flow_method"
        )
        return [Problem("flow_method", "needs_flag", text)]
    flag = "policy_loss" if algorithm.algorithm == "ppo" else "algorithm"
    text = f"--{flag} {getattr(algorithm, flag)} does not work with this policy: {_SCORED_BY[wanted]}"
    return [Problem(flag, "needs_flag", text)]


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
        text = f"--flow_noise_level_end {level} does not work with this policy: {_NO_LEVEL}; leave it out"
        problems.append(Problem("flow_noise_level_end", "mismatch", text))
    return problems + [
        Problem(flag, "mismatch", f"{as_typed(flag, value)}: {spec.missing[quantity]}; leave it out")
        for flag, quantity, value, wanted in needed
        if wanted and quantity in spec.missing
    ]


def untrainable(missing: Mapping[str, str]) -> list[Problem]:
    """A policy that no stored decisions can train; `missing` as in `PolicySpec`."""
    return (
        [Problem("pretrain", "mismatch", f"--pretrain: this command cannot train this policy: {missing['training']}")]
        if "training" in missing
        else []
    )


def supervision_problems(missing: Mapping[str, str], config: SFTConfig) -> list[Problem]:
    """Settings of a supervised loss that the policy does not have; `missing` as in `PolicySpec`."""
    problems = untrainable(missing)
    if config.label_smoothing and "label_smoothing" in missing:
        text = f"--label_smoothing does not work with this policy: {missing['label_smoothing']}; leave it out"
        problems.append(Problem("label_smoothing", "mismatch", text))
    if config.sft_loss is not None and "sft_loss" in missing:
        text = f"--sft_loss does not work with this policy: {missing['sft_loss']}; leave it out"
        problems.append(Problem("sft_loss", "mismatch", text))
    return problems

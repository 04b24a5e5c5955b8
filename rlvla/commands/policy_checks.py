"""Checks that the flags of a command fit the action distribution of its policy."""

from __future__ import annotations

from collections.abc import Mapping

from rlvla.commands.problem_texts import problem, unread
from rlvla.models.policy import PolicySpec
from rlvla.trainer.algorithm_config import AlgorithmConfig, learner_needs_critic, learner_needs_reference
from rlvla.trainer.config import LoggingConfig
from rlvla.trainer.supervised.config import SFTConfig
from rlvla.utils.cli.flags import as_typed
from rlvla.utils.errors import Problem

# Losses that compare probabilities rather than densities.
PROBABILITY_LOSSES = ("dppo_tv", "dppo_kl")


def quantity_problems(spec: PolicySpec, algorithm: AlgorithmConfig) -> list[Problem]:
    """Flags that need a quantity the policy does not have (`PolicySpec.missing`), each with the reason."""
    needs_critic = learner_needs_critic(algorithm)
    needed = [
        ("entropy_loss_coef", "entropy", bool(algorithm.entropy_loss_coef)),
        ("kl_estimator", "kl", algorithm.exact_kl and learner_needs_reference(algorithm)),
        ("advantage_estimator", "sum_pi_squared", "sum_pi_squared" in algorithm.estimator_options),
        ("advantage_estimator", "critic", needs_critic and not algorithm.share_backbone),
        ("share_backbone", "value_head", needs_critic and algorithm.share_backbone),
        ("policy_loss", "probabilities", algorithm.policy_loss in PROBABILITY_LOSSES),
    ]
    return [
        problem(flag, "mismatch", value=getattr(algorithm, flag), why=spec.missing[quantity])
        for flag, quantity, wanted in needed
        if wanted and quantity in spec.missing
    ]


def supervision_problems(missing: Mapping[str, str], config: SFTConfig) -> list[Problem]:
    """Settings of a supervised loss that the policy does not have; `missing` as in `PolicySpec`."""
    problems = []
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

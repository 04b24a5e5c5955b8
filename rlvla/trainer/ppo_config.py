"""All settings of a reinforcement-learning run in one place, and the controller of the KL coefficient they ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rlvla.algorithms.kl import AdaptiveKLController, FixedKLController
from rlvla.envs.config import SplitConfig
from rlvla.trainer.config import (
    AlgorithmConfig,
    BatchConfig,
    CorrectionConfig,
    FilterConfig,
    GuardConfig,
    OptimizationConfig,
    ScheduleConfig,
)
from rlvla.trainer.policy_export import PolicyRecord


@dataclass(frozen=True)
class PPOConfig:
    """What `PPOTrainer` is told.

    Attributes:
        batch: amounts.
        algorithm: advantages and losses.
        optimization: learning rates, what is frozen, averages.
        schedule: when something is evaluated, saved and logged.
        split: initial states of training and of evaluation.
        record: what is noted in exported policies.
        filters: which groups are trained on.
        correction: of the gap between rollout and training.
        reward_weights: the current weight of each reward source.
        reward_model_coef: weight of the reward model's score.
        guards: what ends a run early.
    """

    batch: BatchConfig
    algorithm: AlgorithmConfig
    optimization: OptimizationConfig
    schedule: ScheduleConfig
    split: SplitConfig
    record: PolicyRecord
    filters: FilterConfig = field(default_factory=FilterConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    reward_weights: Callable[[], dict[str, float]] = dict
    reward_model_coef: float = 1.0
    guards: GuardConfig = GuardConfig()


def kl_controller(algorithm: AlgorithmConfig) -> FixedKLController:
    """Adaptive where there is a target, else a constant coefficient."""
    if algorithm.kl_target is not None:
        return AdaptiveKLController(algorithm.init_kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    return FixedKLController(algorithm.init_kl_coef)

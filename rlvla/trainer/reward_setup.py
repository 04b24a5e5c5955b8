"""The reward sources of a run, checked against the learner they are meant for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlvla.envs.base import TaskSpec
from rlvla.rewards import RewardConfig, RewardPlan
from rlvla.trainer import reward_model_source as _rm_model  # noqa: F401  registers the source
from rlvla.trainer.algorithm_config import ONE_ADVANTAGE_PER_EPISODE
from rlvla.trainer.config import AlgorithmConfig, OptimizationConfig
from rlvla.utils.errors import ConfigError
from rlvla.utils.strategy_config import StrategyConfig


def learner_gamma(algorithm: AlgorithmConfig) -> float:
    """The discount that shaping must use: `--gamma` where it is read, 1 for methods that compare whole episodes."""
    return algorithm.gamma if "gamma" in algorithm.estimator_options else 1.0


def reward_problems(config: RewardConfig, algorithm: AlgorithmConfig, tasks: Sequence[TaskSpec]) -> list[str]:
    """Everything that is wrong with the sources, by themselves, for the tasks, and for the learner."""
    problems: list[str] = []
    try:
        plan = RewardPlan.from_config(config)
        problems += plan.problems(tasks)
        plan.close()
    except ConfigError as error:
        problems += error.problems
    gamma = learner_gamma(algorithm)
    if config.gamma_shaping is not None and config.gamma_shaping != gamma:
        discounts = "gamma" in algorithm.estimator_options
        source = "--gamma" if discounts else f"{algorithm.advantage_estimator} compares whole episodes"
        problems.append(
            f"--gamma_shaping {config.gamma_shaping} must equal the learner's discount, {gamma} ({source}); otherwise "
            "shaping changes which policy is best"
        )
    if _shapes(config) and gamma < 1 and algorithm.advantage_level != "action":
        problems.append(
            f"--advantage_level {algorithm.advantage_level}: shaping discounts per environment step; take action, or "
            "--gamma 1"
        )
    if _vlm_potential(config) and algorithm.advantage_estimator in ONE_ADVANTAGE_PER_EPISODE:
        problems.append(
            f"--vlm_progress_term potential adds up to the same for all episodes of an initial state, and "
            f"--advantage_estimator {algorithm.advantage_estimator} compares their sums: nothing would be learned from "
            "it; take --vlm_progress_term delta"
        )
    if config.dynamic_truncation and algorithm.needs_critic and not algorithm.bootstrap_truncated:
        problems.append(
            "--dynamic_truncation with --no-bootstrap_truncated would count an episode that was cut short as worth "
            "nothing more; leave one of them out"
        )
    return problems


def _shapes(config: RewardConfig) -> bool:
    return ("rm" in _sources(config) and config.rm_mode == "hybrid") or _vlm_potential(config)


def _vlm_potential(config: RewardConfig) -> bool:
    return "vlm" in _sources(config) and config.vlm_progress_term == "potential"


def _sources(config: RewardConfig) -> set[str]:
    return {spec.partition(":")[0] for spec in config.reward}


def waits_on_host(strategy: StrategyConfig, optimization: OptimizationConfig) -> bool:
    """Whether the model of `rm_model` leaves the device when it does not judge."""
    return strategy.zero_stage == 3 or optimization.offload_during_rollout


def tie_to_learner(
    plan: RewardPlan, algorithm: AlgorithmConfig, device: torch.device | str, *, waits_on_host: bool = False
) -> None:
    """Give the sources the learner's discount, its view of what a truncated episode is, its device, and their place."""
    bootstraps = algorithm.needs_critic and algorithm.bootstrap_truncated
    for source in plan.sources.values():
        if hasattr(source, "gamma"):
            source.gamma = learner_gamma(algorithm)
        if hasattr(source, "device"):
            source.device = device
        if hasattr(source, "waits_on_host"):
            source.waits_on_host = waits_on_host
        if hasattr(source, "truncation_ends"):
            # A machine's potential is nowhere above that of the goal: without a critic it may stay where a truncated
            # episode has come to. What a model thinks of a frame near the goal would be paid above success.
            source.truncation_ends = algorithm.needs_critic and not bootstraps
        if hasattr(source, "bootstraps"):
            source.bootstraps = bootstraps

"""Flags of a run that plays while it trains (`--async_rollout`): what follows from them, and their checks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlvla.commands.problem_texts import problem, unread
from rlvla.trainer.algorithm import Algorithm
from rlvla.trainer.algorithm_config import LEARNERS, learner_scores
from rlvla.trainer.config import AsyncConfig
from rlvla.utils.cli.flags import as_typed
from rlvla.utils.errors import Problem

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun

# Decisions of other weights than those before the update: ignored where they have become 5 times more or less likely.
WEIGHTS = {"rollout_is": "icepop", "rollout_is_low": 0.2, "rollout_is_high": 5.0}


def with_correction(flags: PPORun) -> PPORun:
    """The flags with the importance weights that fit decisions of older weights, unless --rollout_is is given."""
    weighted = learner_scores(flags.algorithm) in ("log_probs", "step_log_probs")
    if not flags.asynchronous.plays_ahead or not weighted or "rollout_is" in flags.given:
        return flags
    chosen = {name: value for name, value in WEIGHTS.items() if name not in flags.given}
    return replace(flags, correction=replace(flags.correction, **chosen))


def async_problems(flags: PPORun) -> list[Problem]:
    """Settings that have no effect, or with which nothing can be played while the policy is trained."""
    config, problems = flags.asynchronous, []
    given = {name: getattr(config, name) for name in ("max_staleness", "partial_rollout", "proximal")}
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
    if learner_scores(flags.algorithm) not in ("log_probs", "step_log_probs"):
        name = flags.algorithm.algorithm
        loss = f"--policy_loss {flags.algorithm.policy_loss}" if name == "ppo" else f"--algorithm {name}"
        return [problem("proximal", "unsupported", value=flags.asynchronous.proximal, loss=loss)]
    reasons = {
        "--rollout_is_batch_normalize": flags.correction.rollout_is_batch_normalize,
        "--rollout_rs": flags.correction.rollout_rs != "none",
    }
    value = flags.asynchronous.proximal
    return [problem("proximal", "contradiction", value=value, other=flag) for flag, given in reasons.items() if given]

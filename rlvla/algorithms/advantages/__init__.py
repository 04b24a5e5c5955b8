"""Advantage estimators by name.

Every estimator is called as `fn(token_level_rewards, response_mask, *, group_ids=None, values=None,
reward_baselines=None, gamma=1.0, lam=1.0, norm_by_std=True, **extra)` and returns (advantages, returns), both [B, T]
and 0 outside the mask, without gradient, in float64 if an input is float64 and in float32 otherwise. Each reads only
the arguments it names. Names are known without torch; a function is imported when it is first asked for.
"""

from rlvla.algorithms.advantages.registry import (
    AdvantageEstimator,
    advantage_estimator_options,
    get_advantage_estimator,
    list_advantage_estimators,
    register_advantage_estimator,
)

__all__ = [
    "AdvantageEstimator",
    "advantage_estimator_options",
    "get_advantage_estimator",
    "list_advantage_estimators",
    "register_advantage_estimator",
]

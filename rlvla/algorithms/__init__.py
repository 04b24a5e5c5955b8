"""The math of the updates: pure functions on tensors.

Advantages, policy and value losses, KL, aggregation, masked statistics, filtering, rollout correction, balancing, flow
matching and off-policy actor-critic. Depends on torch and numpy only, not on other packages of rlvla.
"""

from rlvla.algorithms.advantages import (
    get_advantage_estimator,
    list_advantage_estimators,
    register_advantage_estimator,
)
from rlvla.algorithms.policy_losses import get_policy_loss, list_policy_losses, register_policy_loss

__all__ = [
    "get_advantage_estimator",
    "get_policy_loss",
    "list_advantage_estimators",
    "list_policy_losses",
    "register_advantage_estimator",
    "register_policy_loss",
]

"""The math of off-policy actor-critic learning (SAC, RLPD, DSRL): pure functions on tensors.

Shapes: B rows, M critics, n action primitives, D parameters of a primitive (or dimensions of a plain action). A policy
over primitives is pi(k | s) pi(x | s, k); plain SAC has no primitives, and `log_probs` belong to its actions.
"""

from rlvla.algorithms.off_policy.augmentation import random_shift
from rlvla.algorithms.off_policy.losses import (
    actor_loss,
    conservative_loss,
    critic_loss,
    imitation_loss,
    parameter_target_entropy,
    primitive_target_entropy,
    temperature_loss,
)
from rlvla.algorithms.off_policy.primitives import (
    critic_actions,
    over_primitives,
    parameter_mask,
    primitive_log_probs,
)
from rlvla.algorithms.off_policy.soft_values import random_critics, reduce_critics, soft_target, soft_value
from rlvla.algorithms.off_policy.tanh_normal import (
    log_one_minus_tanh_squared,
    tanh_normal_entropy,
    tanh_normal_log_prob,
    tanh_normal_sample,
)
from rlvla.algorithms.off_policy.target_networks import update_target

__all__ = [
    "actor_loss",
    "conservative_loss",
    "critic_actions",
    "critic_loss",
    "imitation_loss",
    "log_one_minus_tanh_squared",
    "over_primitives",
    "parameter_mask",
    "parameter_target_entropy",
    "primitive_log_probs",
    "primitive_target_entropy",
    "random_critics",
    "random_shift",
    "reduce_critics",
    "soft_target",
    "soft_value",
    "tanh_normal_entropy",
    "tanh_normal_log_prob",
    "tanh_normal_sample",
    "temperature_loss",
    "update_target",
]

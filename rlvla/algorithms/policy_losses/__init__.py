"""Policy losses by name.

Every loss is called as `fn(log_probs, old_log_probs, advantages, response_mask, *, clip_low=0.2, clip_high=0.2,
clip_dual=None, agg_mode="token-mean", rollout_weights=None, **extra)` and returns (scalar loss, metrics). Tensors are
[B, T]; only `log_probs` carries a gradient; metrics are detached scalars: `pg_clipfrac`, `pg_clipfrac_lower` and
`ppo_kl`. `num_tokens`, `num_sequences`, `dp_size`, `horizon`, `trajectory_ids` and `trajectory_tokens` are handed to
`rlvla.algorithms.losses.aggregate_loss`. Each loss reads only the arguments it names. Names are known
without torch; a function is imported when it is first asked for.
"""

from rlvla.algorithms.policy_losses.registry import (
    PolicyLoss,
    get_policy_loss,
    list_policy_losses,
    policy_loss_options,
    register_policy_loss,
)

__all__ = [
    "PolicyLoss",
    "get_policy_loss",
    "list_policy_losses",
    "policy_loss_options",
    "register_policy_loss",
]

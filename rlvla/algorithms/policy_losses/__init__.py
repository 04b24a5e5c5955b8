"""Policy losses by name.

The contract, shared by all losses; each function documents only what is specific to it. A loss is called as
`fn(log_probs, old_log_probs, advantages, response_mask, *, clip_low=0.2, clip_high=0.2, clip_dual=None,
agg_mode="token-mean", rollout_weights=None, **extra)`:

- `log_probs`: [B, T], current policy; the only input that receives a gradient.
- `old_log_probs`: [B, T], policy before the update.
- `advantages`: [B, T].
- `response_mask`: [B, T] bool; entries outside the mask never affect the loss, its gradient or the metrics.
- `clip_low`, `clip_high`: the ratio is clipped to [1 - clip_low, 1 + clip_high]; 0 <= clip_low <= clip_high.
- `clip_dual`: upper bound on the ratio where the advantage is negative; None disables it.
- `agg_mode`: how per-token losses are reduced, see `rlvla.algorithms.losses.aggregate_loss`.
- `rollout_weights`: [B, T] importance weights that multiply the per-token loss, or None.
- `column_shape`: (A, S, D) with T = A * S * D, for losses of denoising steps: S scores of each number of an action.
- `extra`: `num_tokens`, `num_sequences`, `dp_size`, `horizon`, `trajectory_ids` and `trajectory_tokens` are passed to
  `aggregate_loss`; everything else is ignored.

It returns the scalar loss and detached scalar metrics: `pg_clipfrac` (fraction of valid tokens that were clipped),
`pg_clipfrac_lower` (fraction bounded by the dual clip) and `ppo_kl` (mean of old_log_probs - log_probs). ValueError is
raised for shapes that differ, a mask that is not bool and numbers out of range.

A loss reads only the arguments in its signature. Its options (`register_policy_loss(name, options=...)`) are
command-line flags whose values are passed as keyword arguments. The modules of this package are imported when losses
are listed; torch is not (`rlvla.algorithms.lazy`). In the formulas, A is the advantage, rho the probability ratio
exp(log_probs - old_log_probs), and sg[.] stops the gradient.
"""

from rlvla.algorithms.policy_losses.registry import (
    POLICY_LOSSES,
    PolicyLoss,
    get_policy_loss,
    list_policy_losses,
    register_policy_loss,
)

__all__ = [
    "POLICY_LOSSES",
    "PolicyLoss",
    "get_policy_loss",
    "list_policy_losses",
    "register_policy_loss",
]

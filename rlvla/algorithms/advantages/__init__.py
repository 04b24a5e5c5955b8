"""Advantage estimators by name.

The contract, shared by all estimators; each function documents only what is specific to it. An estimator is called as
`fn(token_level_rewards, response_mask, *, group_ids=None, values=None, reward_baselines=None, gamma=1.0, lam=1.0,
norm_by_std=True, **extra)`:

- `token_level_rewards`: [B, T].
- `response_mask`: [B, T] bool; a token outside the mask neither contributes nor discounts.
- `group_ids`: one hashable id per row; rows with equal ids started from the same initial state.
- `values`: [B, T], the critic's estimates.
- `reward_baselines`: [B], total reward of the greedy episode.
- `gamma`, `lam`: discount and GAE decay per valid token, in [0, 1].
- `norm_by_std`: divide by the standard deviation of the group.
- `process_group`: statistics of the batch are taken over all ranks, see `rlvla.algorithms.masking.all_reduce_sum`.
- `extra`: inputs of other estimators; ignored.

It returns (advantages, returns), both [B, T], 0 outside the mask, without gradient, in float64 if any input is float64
and in float32 otherwise. Group estimators return the advantages twice. ValueError is raised for a missing input, shapes
that differ, a mask that is not bool, numbers out of range, and fewer than 2 valid tokens where the result is whitened.

An estimator reads only the arguments in its signature. Its options (`register_advantage_estimator(name, options=...)`)
are command-line flags whose values are passed as keyword arguments. The modules of this package are imported when
estimators are listed; torch is not (`rlvla.algorithms.lazy`).
"""

from rlvla.algorithms.advantages.registry import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    get_advantage_estimator,
    list_advantage_estimators,
    register_advantage_estimator,
)

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "get_advantage_estimator",
    "list_advantage_estimators",
    "register_advantage_estimator",
]

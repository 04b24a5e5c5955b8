"""An estimator and a loss of the user's own, as a file for `--custom_module`."""

from rlvla.algorithms import (
    get_advantage_estimator,
    get_policy_loss,
    register_advantage_estimator,
    register_policy_loss,
)


@register_advantage_estimator("test_half_grpo")
def half(rewards, mask, *, group_ids=None, **extra):
    advantages, returns = get_advantage_estimator("grpo")(rewards, mask, group_ids=group_ids)
    return 0.5 * advantages, returns


@register_policy_loss("test_double_ppo")
def double(new, old, advantages, mask, *, clip_low=0.2, clip_high=0.2, agg_mode="token-mean", **extra):
    loss, metrics = get_policy_loss("ppo")(
        new, old, advantages, mask, clip_low=clip_low, clip_high=clip_high, agg_mode=agg_mode, **extra
    )
    return 2 * loss, metrics | {"own": loss.detach()}

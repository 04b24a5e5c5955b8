"""Deprecated name of `rlvla.models.value_models`."""

from rlvla.models.value_models import load_feature_critic, load_feature_reward_model

__all__ = ["load_feature_critic", "load_feature_reward_model"]

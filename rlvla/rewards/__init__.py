"""Reward sources: what an episode is worth. Importing the room registers the sources that ship with it."""

from rlvla.rewards import success as _success  # noqa: F401
from rlvla.rewards.base import EpisodeRewards, RewardSource, StepInfo, parse_rewards, register_reward, reward_names

__all__ = ["EpisodeRewards", "RewardSource", "StepInfo", "parse_rewards", "register_reward", "reward_names"]

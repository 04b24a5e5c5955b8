"""Reward sources and success detectors. Importing the package registers the built-in ones."""

from rlvla.rewards import environment as _environment  # noqa: F401
from rlvla.rewards import function as _function  # noqa: F401
from rlvla.rewards import judged_machine as _judged_machine  # noqa: F401
from rlvla.rewards import overlong as _overlong  # noqa: F401
from rlvla.rewards import remote as _remote  # noqa: F401
from rlvla.rewards import success as _success  # noqa: F401
from rlvla.rewards.base import (
    EpisodeReward,
    EpisodeStart,
    RewardSource,
    SampleSource,
    StepInfo,
    parse_rewards,
    register_reward,
    reward_names,
)
from rlvla.rewards.compose import EpisodeRewards, PaidRewards, RewardPlan
from rlvla.rewards.config import RewardConfig
from rlvla.rewards.state_input import StateInput, StateInputSettings
from rlvla.rewards.success_source import EpisodeSuccess, SuccessConfig, SuccessSource, make_success_source
from rlvla.rewards.vlm import source as _vlm  # noqa: F401

__all__ = [
    "EpisodeReward",
    "EpisodeRewards",
    "EpisodeStart",
    "EpisodeSuccess",
    "PaidRewards",
    "RewardConfig",
    "RewardPlan",
    "RewardSource",
    "SampleSource",
    "StateInput",
    "StateInputSettings",
    "StepInfo",
    "SuccessConfig",
    "SuccessSource",
    "make_success_source",
    "parse_rewards",
    "register_reward",
    "reward_names",
]

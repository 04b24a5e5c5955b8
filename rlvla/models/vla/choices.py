"""Allowed values of checkpoint settings, and the constants of platforms; importable without torch."""

from __future__ import annotations

from typing import Any

from rlvla.utils.errors import ConfigError

REGRESSION = "oft_regression"
MODEL_VARIANTS = ("oft", "autoregressive", REGRESSION)
ACTION_STD_KINDS = ("learned", "features", "fixed")
# Standard deviation of normalized actions. Below, log-probs of float32 actions are meaningless; above, nearly all
# actions are clipped.
MIN_STD, MAX_STD = 1e-3, 2.0
MAX_NOISE_CORRELATION = 0.99  # of consecutive actions; at 1 they have no density
ATTENTION_IMPLEMENTATIONS = ("sdpa", "flash_attention_2")


PLATFORMS: dict[str, dict[str, Any]] = {
    "libero": {
        "action_chunk_len": 8,
        "action_dim": 7,
        "action_normalization": "q99",
        "image_preprocessing": "libero",
        "gripper_convention": "libero",
    },
    "bridge": {"action_chunk_len": 5, "action_dim": 7, "action_normalization": "q99"},
    "aloha": {"action_chunk_len": 25, "action_dim": 14, "action_normalization": "bounds"},
    "robotwin": {"action_chunk_len": 25, "action_dim": 14, "action_normalization": "bounds"},
}


def with_platform(settings: dict[str, Any], platform: str, *, model_variant: str) -> dict[str, Any]:
    """Complete the `settings` of a configuration with the constants of a platform.

    Args:
        settings: settings from config.json and the caller; they must not contradict the platform.
        platform: one of `PLATFORMS`.
        model_variant: the autoregressive variant predicts one action on every platform.

    Raises:
        ConfigError: an unknown platform, or a list of all contradictions.
    """
    if platform not in PLATFORMS:
        raise ConfigError(f"platform {platform!r} is unknown; use one of {sorted(PLATFORMS)}")
    constants = dict(PLATFORMS[platform])
    if model_variant == "autoregressive":
        constants["action_chunk_len"] = 1
    problems = [
        f"platform {platform} means {name} {value}, but the checkpoint's config.json says {settings[name]}; leave the "
        "platform out or choose another"
        for name, value in constants.items()
        if settings.get(name) not in (None, value)
    ]
    if problems:
        raise ConfigError(problems)
    return {**settings, **constants}

"""The rollout engine."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Decision": "rlvla.models.policy",
    "DroppedEpisode": "rlvla.rollout.stats",
    "Episode": "rlvla.rollout.episode",
    "EpisodeRequest": "rlvla.rollout.episode",
    "FinishedEpisode": "rlvla.rollout.episode",
    "RolloutConfig": "rlvla.rollout.config",
    "RolloutEngine": "rlvla.rollout.engine",
    "RolloutPolicy": "rlvla.models.policy",
    "RolloutStats": "rlvla.rollout.stats",
    "TooManyDroppedError": "rlvla.rollout.stats",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import on first use, so that `RolloutConfig` can be used without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(_HOMES[name]), name)

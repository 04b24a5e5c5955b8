"""The rollout engine."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Decision": "engine",
    "DroppedEpisode": "stats",
    "Episode": "episode",
    "EpisodeRequest": "episode",
    "RolloutConfig": "config",
    "RolloutEngine": "engine",
    "RolloutPolicy": "engine",
    "RolloutStats": "stats",
    "TooManyDroppedError": "stats",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import on first use, so that the flags of the engine can be had without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Policies and value models: `Actor`, `Critic`, `ReferenceModel`, `RewardModel`."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Actor": "actor",
    "ActorConfig": "config",
    "ActorCritic": "actor",
    "Critic": "value_models",
    "ReferenceModel": "reference",
    "RewardModel": "value_models",
    "VLAInputs": "vla.inputs",
    "describe": "inspection",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import lazily, so that parts of `rlvla.models.vla` can be used without loading the transformers models."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

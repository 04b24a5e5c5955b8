"""What builders of small policies in LeRobot's format have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlvla.models.lerobot.features import ACTION, IMAGES, STATE, STATISTICS, Feature, Features
from rlvla.utils.errors import ConfigError


def tiny_features(cameras: Sequence[str], image_size: int, state_dim: int, action_dim: int) -> Features:
    """The features of a policy; `cameras` come without `observation.images.`."""
    inputs = {STATE: Feature("STATE", (state_dim,))}
    inputs |= {IMAGES + camera: Feature("VISUAL", (3, image_size, image_size)) for camera in cameras}
    return Features(inputs, {ACTION: Feature("ACTION", (action_dim,))})


def features_as_json(features: Mapping[str, Feature]) -> dict[str, Any]:
    """One side of the features, as in config.json."""
    return {key: {"type": feature.kind, "shape": list(feature.shape)} for key, feature in features.items()}


def statistics_tensors(statistics: Mapping[str, Mapping[str, Sequence[float]]], mode: str) -> dict[str, Tensor]:
    """The content of a file of statistics.

    Raises:
        ConfigError: those that the normalization mode needs are missing.
    """
    missing = [
        f"{key}.{name}" for key in (STATE, ACTION) for name in STATISTICS[mode] if name not in statistics.get(key, {})
    ]
    if missing:
        raise ConfigError(f"the statistics lack {', '.join(missing)}, which {mode} needs")
    known = {name for names in STATISTICS.values() for name in names}
    return {
        f"{key}.{name}": torch.from_numpy(np.asarray(values, np.float32))
        for key, entries in statistics.items()
        for name, values in entries.items()
        if name in known
    }


@torch.no_grad()
def initialize(network: nn.Module, generator: torch.Generator) -> None:
    """Random weights in place: Xavier matrices, zero biases, embeddings such that their scale comes to 1."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.view(module.weight.shape[0], -1), generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, module.embedding_dim**-0.5, generator=generator)

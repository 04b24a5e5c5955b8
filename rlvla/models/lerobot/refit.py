"""A policy's weights for other data: features, pipelines and statistics are written anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlvla.models.lerobot.folder import CONFIG_FILE, LeRobotFolder, write_folder
from rlvla.models.lerobot.new import NewPolicyFacts
from rlvla.models.lerobot.processors import (
    NORMALIZER,
    OLD_PREFIXES,
    POSTPROCESSOR,
    PREPROCESSOR,
    UNNORMALIZER,
    Processors,
    pipelines,
)
from rlvla.models.lerobot.settings import SETTINGS_FILE
from rlvla.models.lerobot.tiny import features_as_json, statistics_tensors

STATE_FILES = (
    f"policy_preprocessor_step_5_{NORMALIZER}.safetensors",
    f"policy_postprocessor_step_0_{UNNORMALIZER}.safetensors",
)
_OF_OTHER_DATA = {PREPROCESSOR, POSTPROCESSOR, SETTINGS_FILE, "train_config.json", "README.md"}


def new_statistics(facts: NewPolicyFacts, modes: Mapping[str, str]) -> dict[str, Tensor]:
    """The content of the new files of statistics; errors as in `refit_folder`."""
    statistics: dict[str, Tensor] = {}
    for mode in {modes.get(kind, "IDENTITY") for kind in ("STATE", "ACTION")}:
        statistics |= statistics_tensors(facts.lerobot_statistics(), mode)
    return statistics


def refit_folder(
    folder: LeRobotFolder,
    target: Path,
    facts: NewPolicyFacts,
    *,
    processors: Processors,
    modes: Mapping[str, str],
    tokenizer: Mapping[str, Any],
    text_step: str,
    normalize_first: bool = False,
) -> None:
    """Write the weights of a folder with features named like the cameras, and the statistics of other data.

    Args:
        folder: the policy's files.
        target: the new folder.
        facts: cameras, states, actions and statistics.
        processors: of the folder; their statistics are left out.
        modes: kind of feature -> normalization mode.
        tokenizer: settings of the tokenizer step.
        text_step: the step before it.
        normalize_first: see `pipelines`.

    Raises:
        ConfigError: statistics that a mode needs are missing.
    """
    features = facts.features()
    kinds = {key: (feature.kind, feature.shape) for key, feature in {**features.inputs, **features.outputs}.items()}
    inputs, outputs = features_as_json(features.inputs), features_as_json(features.outputs)
    raw = {**folder.config, "input_features": inputs, "output_features": outputs, "empty_cameras": 0}
    statistics = new_statistics(facts, modes)
    left_out = _OF_OTHER_DATA | set(processors.state_files)
    tensors = folder.read_tensors()
    write_folder(
        target,
        {name: tensor for name, tensor in tensors.items() if not name.startswith(OLD_PREFIXES)},
        companions={name: content for name, content in folder.companions.items() if name not in left_out},
        contents={
            CONFIG_FILE: raw,
            **pipelines(
                kinds,
                modes,
                tokenizer=tokenizer,
                text_step=text_step,
                state_files=STATE_FILES,
                normalize_first=normalize_first,
            ),
        },
        states=dict.fromkeys(STATE_FILES, statistics),
        metadata=folder.metadata,
    )

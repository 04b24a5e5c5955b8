"""New policies in LeRobot's format with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlvla.models.lerobot.config import Features, LeRobotConfig, features_json
from rlvla.models.lerobot.folder import CONFIG_FILE, write_folder
from rlvla.models.lerobot.processors import new_pipelines, state_files, statistics_tensors, tokenizer_settings


def new_config(family: str, features: Features, *, mode: str, chunk_size: int, **settings: Any) -> dict[str, Any]:
    """The content of a new config.json, in which all predicted actions are executed and nothing is padded.

    Args:
        family: its `type`.
        features: inputs and outputs.
        mode: normalization mode of states and actions.
        chunk_size: C, actions that are denoised together.
        **settings: further entries, or other values of these.
    """
    return {
        "type": family,
        "n_obs_steps": 1,
        "input_features": features_json(features.inputs),
        "output_features": features_json(features.outputs),
        "device": "cpu",
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        "chunk_size": chunk_size,
        "n_action_steps": chunk_size,
        "max_state_dim": features.state_dim,
        "max_action_dim": features.action_dim,
        **settings,
    }


def write_new(
    folder: Path,
    config: LeRobotConfig,
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    padding: str,
    files: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write the folder of a new policy.

    Args:
        folder: created if absent.
        config: read from its config.json.
        tensors: of model.safetensors.
        statistics: "observation.state" and "action" -> statistic -> numbers.
        padding: of prompts, see `PromptTokenizer`.
        files: further JSON files.

    Raises:
        ConfigError: statistics that the normalization mode needs are missing.
    """
    states = statistics_tensors(statistics, config.normalization_mapping["ACTION"])
    tokenizer = tokenizer_settings(config.tokenizer_name, config.tokenizer_max_length, padding)
    pipelines = new_pipelines(config, tokenizer)
    contents = {CONFIG_FILE: config.raw, **pipelines, **files}
    write_folder(
        folder, tensors, companions={}, contents=contents, states=dict.fromkeys(state_files(pipelines), states)
    )


@torch.no_grad()
def initialize(network: nn.Module, seed: int) -> dict[str, Tensor]:
    """Random weights in place: Xavier matrices, zero biases, embeddings scaled to norm 1; returns the state dict."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.view(module.weight.shape[0], -1), generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, module.embedding_dim**-0.5, generator=generator)
    return {name: tensor.detach() for name, tensor in network.state_dict().items()}

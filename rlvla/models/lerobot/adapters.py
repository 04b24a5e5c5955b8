"""LoRA adapters in the towers of a LeRobot policy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rlvla.models.config import ActorConfig
from rlvla.models.lerobot.network import FlowNetwork
from rlvla.models.lora import ALL_LINEAR, LANGUAGE, MergedWeights, fuse_adapters, matching_layers
from rlvla.utils.errors import require

EXPERT = "expert"


def flow_lora_layers(network: FlowNetwork, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that get adapters, among the trainable ones.

    Args:
        network: after `set_trainable`.
        targets: "language" (decoder and expert), "expert", "all-linear" or suffixes of layer names.

    Raises:
        ConfigError: as in `matching_layers`.
    """
    towers = {
        name: network.part_of(f"{name}.weight")
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    }
    linear = [name for name, part in towers.items() if part]
    expert = [name for name in linear if towers[name] == EXPERT]
    language = [name for name in linear if towers[name] in ("language", EXPERT)]
    return matching_layers(linear, targets, {LANGUAGE: language, EXPERT: expert, ALL_LINEAR: linear})


def add_flow_adapters(network: FlowNetwork, config: ActorConfig) -> None:
    """Add adapters to the network, and freeze everything else; initially they do not change the output."""
    peft = require("peft", extra="all")
    layers = flow_lora_layers(network, config.lora_targets)
    network.requires_grad_(False)
    pattern = "|".join(re.escape(name) for name in layers)
    options = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=f"({pattern})", **options), network)
    fuse_adapters(network)


@contextmanager
def adapters_off(network: nn.Module) -> Iterator[None]:
    """Disable the adapters within the block."""
    layers: list[Any] = [module for module in network.modules() if hasattr(module, "enable_adapters")]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(weights: Mapping[str, Tensor], config: ActorConfig) -> dict[str, Tensor]:
    """The network's tensors under the names of its files, adapters merged."""
    if not config.lora_rank:
        return dict(weights)
    return dict(MergedWeights(weights, config.lora_alpha / config.lora_rank))

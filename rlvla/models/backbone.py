"""What the options of a run change in the body of a network, policy or not."""

from __future__ import annotations

from rlvla.models.config import ActorConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction


def prepare_backbone(vla: OpenVLAForActionPrediction, config: ActorConfig) -> None:
    """Choose the attention kernel, recompute activations, freeze the vision towers; adapters are not made.

    Raises:
        ConfigError: the kernel is unknown, or its package is not installed.
    """
    vla.set_attention(config.attn_implementation)
    if config.gradient_checkpointing:
        vla.gradient_checkpointing_enable()
    if config.freeze_vision_backbone:
        vla.vision_backbone.requires_grad_(False)

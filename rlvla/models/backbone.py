"""Options of a run that change the backbone of any network, policy or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlvla.models.config import ActorConfig

if TYPE_CHECKING:
    from rlvla.models.vla.openvla import OpenVLAForActionPrediction


def prepare_backbone(vla: OpenVLAForActionPrediction, config: ActorConfig) -> None:
    """Set the attention kernel, gradient checkpointing and frozen vision towers; adds no adapters.

    Raises:
        ConfigError: the kernel is unknown, or its package is not installed.
    """
    vla.set_attention(config.attn_implementation)
    if config.gradient_checkpointing:
        vla.gradient_checkpointing_enable()
    if config.freeze_vision_backbone:
        vla.vision_backbone.requires_grad_(False)

"""The vision tower of SmolVLM: transformers' encoder with patch embeddings of its own, and the connector."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMEncoder

from rlvla.models.smolvla.vlm import VlmConfig


class PatchEmbeddings(nn.Module):
    """Patches with learned positions; images of another size than the tower's take the nearest position before them.

    Args:
        vlm: sizes.
        shifted: move all rows and columns but the first to the position before them, as some releases of transformers
            do by rounding (4.57, which LeRobot 0.4.4 runs on; not those that SmolVLM was trained with, nor 5).
    """

    def __init__(self, vlm: VlmConfig, *, shifted: bool = False):
        super().__init__()
        self.shifted = shifted
        vision = vlm.vision
        self.side = vision.image_size // vision.patch_size
        self.patch_embedding = nn.Conv2d(
            vision.num_channels, vision.hidden_size, kernel_size=vision.patch_size, stride=vision.patch_size
        )
        self.position_embedding = nn.Embedding(self.side**2, vision.hidden_size)

    def forward(self, images: Tensor) -> Tensor:
        """[M, 3, H, W] -> [M, patches, width]."""
        patches = self.patch_embedding(images)
        rows, columns = (self._along(n, images.device) for n in patches.shape[-2:])
        positions = rows[:, None] * self.side + columns
        embedded: Tensor = patches.flatten(2).transpose(1, 2) + self.position_embedding(positions.flatten())
        return embedded

    def _along(self, count: int, device: torch.device) -> Tensor:
        """Positions [count] of an image's rows or columns."""
        scaled = torch.arange(count, device=device) * self.side
        return ((scaled - int(self.shifted)).clamp(min=0)) // count


class VisionTower(nn.Module):
    """A SigLIP tower; arguments as for `PatchEmbeddings`."""

    def __init__(self, vlm: VlmConfig, *, shifted: bool = False):
        super().__init__()
        config = copy.deepcopy(vlm.vision)
        config._attn_implementation = "sdpa"
        self.embeddings = PatchEmbeddings(vlm, shifted=shifted)
        self.encoder = SmolVLMEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        """[M, 3, H, W] in [-1, 1] -> [M, patches, width]."""
        images = images.to(self.embeddings.patch_embedding.weight.dtype)
        features: Tensor = self.post_layernorm(self.encoder(self.embeddings(images)).last_hidden_state)
        return features


class Projection(nn.Module):
    """Holds the connector's matrix under its name in the files."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.proj = nn.Linear(inputs, outputs, bias=False)


class Connector(nn.Module):
    """Pixel shuffle, then a projection to the width of the decoder."""

    def __init__(self, vlm: VlmConfig):
        super().__init__()
        self.scale = vlm.scale_factor
        self.modality_projection = Projection(vlm.vision.hidden_size * self.scale**2, vlm.text.width)

    def forward(self, features: Tensor) -> Tensor:
        """[M, patches, d] of a square image -> [M, patches / s^2, width]; s x s neighbors become one token."""
        side = round(features.shape[1] ** 0.5)
        blocks = features.unflatten(1, (side // self.scale, self.scale, side // self.scale, self.scale))
        tokens = blocks.transpose(2, 3).flatten(3).flatten(1, 2)
        projected: Tensor = self.modality_projection.proj(tokens)
        return projected

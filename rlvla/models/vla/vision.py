"""The two ViT towers of OpenVLA, with timm's tensor names but no dependency on timm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlvla.models.sizes import size_problems
from rlvla.utils.errors import ConfigError

LAYER_NORM_EPS = 1e-6

# Settings implied by the names of the public towers (arguments of timm's VisionTransformer).
KNOWN_TOWERS: dict[str, dict[str, Any]] = {
    "vit_large_patch14_reg4_dinov2": {
        "patch_size": 14,
        "embed_dim": 1024,
        "depth": 24,
        "num_heads": 16,
        "init_values": 1e-5,
        "reg_tokens": 4,
        "no_embed_class": True,
    },
    "vit_so400m_patch14_siglip_224": {
        "patch_size": 14,
        "embed_dim": 1152,
        "depth": 27,
        "num_heads": 16,
        "mlp_ratio": 3.7362,
        "class_token": False,
        "global_pool": "map",
    },
}

# timm arguments that affect neither tensors nor features; others unknown to `TowerConfig` are rejected.
IGNORED_TIMM_KWARGS = {"num_classes", "dynamic_img_size", "weight_init", "pretrained", "in_chans"}


@dataclass(frozen=True)
class TowerConfig:
    """Shape of one tower; names, meanings and defaults as in timm's VisionTransformer."""

    img_size: int = 224
    patch_size: int = 16
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    init_values: float | None = None
    class_token: bool = True
    reg_tokens: int = 0
    no_embed_class: bool = False
    global_pool: str = "token"
    act_layer: str | None = None
    film_dim: int | None = None  # width of the language embedding that modulates the blocks; None: no FiLM

    @property
    def num_patches(self) -> int:
        """Patches of one image."""
        return (self.img_size // self.patch_size) ** 2

    @property
    def num_prefix_tokens(self) -> int:
        """Class and register tokens before the patches."""
        return int(self.class_token) + self.reg_tokens


def tower_config(
    model_id: str, image_size: int, overrides: dict[str, Any], *, act_layer: str | None = None
) -> TowerConfig:
    """Shape of the tower `model_id`, with `overrides` in timm's argument names.

    Raises:
        ConfigError: unknown name without overrides, or an argument is unsupported or contradictory.
    """
    defaults = KNOWN_TOWERS.get(model_id.split(".")[0], {})
    if not defaults and not overrides:
        raise ConfigError(
            f"vision tower {model_id!r} is unknown (known: {sorted(KNOWN_TOWERS)}); describe it in timm_model_kwargs"
        )
    settings = {k: v for k, v in overrides.items() if k not in IGNORED_TIMM_KWARGS}
    unknown = sorted(set(settings) - (set(TowerConfig.__dataclass_fields__) - {"film_dim"}))
    if unknown:
        raise ConfigError(f"timm_model_kwargs of {model_id!r} has unsupported entries {unknown}")
    config = TowerConfig(**{"img_size": image_size, "act_layer": act_layer, **defaults, **settings})
    act_layer = config.act_layer
    names = ("img_size", "patch_size", "embed_dim", "depth", "num_heads")
    sizes = {name: getattr(config, name) for name in names} | {"reg_tokens + 1": config.reg_tokens + 1}
    problems = size_problems(sizes, layers="depth")
    if problems:
        raise ConfigError(f"tower {model_id!r}: {text}" for text in problems)
    size, patch, dim, heads = config.img_size, config.patch_size, config.embed_dim, config.num_heads
    checks = {
        f"img_size {size} contradicts image_sizes {image_size}": size != image_size,
        f"img_size {size} is not a multiple of patch {patch}": size % patch,
        f"embed_dim {dim} is not a multiple of {heads} heads": dim % heads,
        f"depth {config.depth}; features come from block depth-2, so at least 2": config.depth < 2,
        f"activation {act_layer!r} is unknown; use gelu or quick_gelu": act_layer not in (None, "gelu", "quick_gelu"),
    }
    problems = [f"tower {model_id!r}: {text}" for text, failed in checks.items() if failed]
    if problems:
        raise ConfigError(problems)
    return config


class LayerScale(nn.Module):
    """A learned scale per channel, stored as `scale_factor` in OpenVLA checkpoints."""

    def __init__(self, dim: int, init_value: float):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((dim,), init_value))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return x * self.scale_factor


class TowerAttention(nn.Module):
    """Multi-head self-attention with one matrix for query, key and value."""

    def __init__(self, config: TowerConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim, bias=config.qkv_bias)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, tokens, dim] -> [B, tokens, dim]."""
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, dim))


class Mlp(nn.Module):
    """Two linear layers with an activation in between."""

    def __init__(self, config: TowerConfig):
        super().__init__()
        hidden = int(config.embed_dim * config.mlp_ratio)
        self.quick = config.act_layer == "quick_gelu"
        self.fc1 = nn.Linear(config.embed_dim, hidden)
        self.fc2 = nn.Linear(hidden, config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        x = self.fc1(x)
        x = x * torch.sigmoid(1.702 * x) if self.quick else F.gelu(x)
        return self.fc2(x)


class Block(nn.Module):
    """A pre-norm transformer block, with LayerScale and FiLM if the tower uses them."""

    def __init__(self, config: TowerConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=LAYER_NORM_EPS)
        self.attn = TowerAttention(config)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(config)
        self.ls1 = self.ls2 = None
        if config.init_values is not None:
            self.ls1 = LayerScale(config.embed_dim, config.init_values)
            self.ls2 = LayerScale(config.embed_dim, config.init_values)
        self.scale = self.shift = None
        if config.film_dim is not None:
            self.scale = nn.Linear(config.film_dim, config.embed_dim)
            self.shift = nn.Linear(config.film_dim, config.embed_dim)

    def forward(self, x: Tensor, language: Tensor | None = None) -> Tensor:
        """[B, tokens, dim] -> [B, tokens, dim]; `language` [B, film_dim] modulates the residual stream."""
        attended = self.attn(self.norm1(x))
        x = x + (attended if self.ls1 is None else self.ls1(attended))
        if self.scale is not None and self.shift is not None:
            x = x * (1 + self.scale(language)[:, None]) + self.shift(language)[:, None]
        fed = self.mlp(self.norm2(x))
        return x + (fed if self.ls2 is None else self.ls2(fed))


class PatchProjection(nn.Conv2d):
    """The patch convolution (kernel = stride) as one matrix product, which is faster for small images."""

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, patches, dim], patches in row-major order."""
        batch, channels, height, width = pixels.shape
        p = self.kernel_size[0]
        patches = pixels.reshape(batch, channels, height // p, p, width // p, p).permute(0, 2, 4, 1, 3, 5)
        patches = patches.reshape(batch, (height // p) * (width // p), channels * p * p)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class PatchEmbed(nn.Module):
    """Holds the patch projection under timm's name `patch_embed.proj`."""

    def __init__(self, config: TowerConfig):
        super().__init__()
        self.proj = PatchProjection(3, config.embed_dim, config.patch_size, stride=config.patch_size)


class AttentionPool(nn.Module):
    """Tensors of SigLIP's pooling head: saved, but unused."""

    def __init__(self, config: TowerConfig):
        super().__init__()
        dim = config.embed_dim
        self.latent = nn.Parameter(torch.zeros(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(config)


class VisionTower(nn.Module):
    """A ViT that returns the patch features of block depth-2, without final norm or prefix tokens.

    The last block, the final norm and the pooling head only exist for saving; they are unused and have no gradient.
    """

    def __init__(self, config: TowerConfig):
        super().__init__()
        self.config = config
        dim = config.embed_dim
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.reg_tokens, dim)) if config.reg_tokens else None
        positions = config.num_patches + (0 if config.no_embed_class else config.num_prefix_tokens)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.attn_pool = AttentionPool(config) if config.global_pool == "map" else None
        self.gradient_checkpointing = False
        for unused in (self.blocks[-1], self.norm, self.attn_pool):
            if unused is not None:
                unused.requires_grad_(False)

    def forward(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """Patch features [B, patches, dim] of normalized images.

        Args:
            pixels: [B, 3, H, W].
            language: [B, film_dim] mean language embedding, for a tower with FiLM.
        """
        x = self._embed(pixels)
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for i in range(self.config.depth - 1):
            block = self.blocks[i]
            x = checkpoint(block, x, language, use_reentrant=False) if recompute else block(x, language)
        return x[:, self.config.num_prefix_tokens :]

    def _embed(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed.proj(pixels)
        if self.config.no_embed_class or not self.config.num_prefix_tokens:
            x = x + self.pos_embed
        prefix = [t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        if prefix:
            x = torch.cat([*prefix, x], dim=1)
            if not self.config.no_embed_class:
                x = x + self.pos_embed
        return x


class VisionBackbone(nn.Module):
    """Both towers on the same images; features are concatenated along channels, images along patches."""

    def __init__(self, featurizer: TowerConfig, fused_featurizer: TowerConfig):
        super().__init__()
        self.featurizer = VisionTower(featurizer)
        self.fused_featurizer = VisionTower(fused_featurizer)

    @property
    def output_dim(self) -> int:
        """Channels of the concatenated features."""
        return self.featurizer.config.embed_dim + self.fused_featurizer.config.embed_dim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.featurizer.pos_embed.dtype

    def forward(self, pixel_values: Tensor, language: Tensor | None = None) -> Tensor:
        """Features [B, N * patches, dims of both towers].

        Args:
            pixel_values: [B, 6N, H, W].
            language: [B, film_dim] mean language embedding, for towers with FiLM.
        """
        batch, channels, height, width = pixel_values.shape
        num_images = channels // 6
        images = pixel_values.reshape(batch * num_images, 6, height, width)
        if language is not None:
            language = language.repeat_interleave(num_images, 0)
        towers = self.featurizer(images[:, :3], language), self.fused_featurizer(images[:, 3:], language)
        features = torch.cat(towers, dim=-1)
        return features.reshape(batch, -1, features.shape[-1])

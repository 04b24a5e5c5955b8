"""The full-size model, without its weights: every key and shape of the public openvla-7b index, written as rules."""

from __future__ import annotations

import pytest
import torch

from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction

# `metadata.total_size` of the public index, in bytes of bfloat16.
PUBLIC_TOTAL_SIZE = 15_082_474_368


def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def norm(name: str, dim: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def tower(name: str, dim: int, depth: int, mlp: int, *, layer_scale: bool) -> dict[str, tuple[int, ...]]:
    """A ViT of 16 x 16 patches of 14 pixels, in timm's names."""
    keys: dict[str, tuple[int, ...]] = {
        f"{name}.pos_embed": (1, 256, dim),
        f"{name}.patch_embed.proj.weight": (dim, 3, 14, 14),
        f"{name}.patch_embed.proj.bias": (dim,),
    }
    for i in range(depth):
        block = f"{name}.blocks.{i}"
        keys |= norm(f"{block}.norm1", dim) | norm(f"{block}.norm2", dim)
        keys |= linear(f"{block}.attn.qkv", 3 * dim, dim) | linear(f"{block}.attn.proj", dim, dim)
        keys |= linear(f"{block}.mlp.fc1", mlp, dim) | linear(f"{block}.mlp.fc2", dim, mlp)
        if layer_scale:
            keys |= {f"{block}.{ls}.scale_factor": (dim,) for ls in ("ls1", "ls2")}
    return keys | norm(f"{name}.norm", dim)


def openvla_7b() -> dict[str, tuple[int, ...]]:
    dino, siglip = "vision_backbone.featurizer", "vision_backbone.fused_featurizer"
    keys = tower(dino, 1024, 24, 4096, layer_scale=True) | tower(siglip, 1152, 27, 4304, layer_scale=False)
    keys |= {f"{dino}.cls_token": (1, 1, 1024), f"{dino}.reg_token": (1, 4, 1024)}
    pool = f"{siglip}.attn_pool"
    keys |= {f"{pool}.latent": (1, 1, 1152)} | linear(f"{pool}.q", 1152, 1152) | linear(f"{pool}.kv", 2304, 1152)
    keys |= linear(f"{pool}.proj", 1152, 1152) | norm(f"{pool}.norm", 1152)
    keys |= linear(f"{pool}.mlp.fc1", 4304, 1152) | linear(f"{pool}.mlp.fc2", 1152, 4304)
    keys |= linear("projector.fc1", 8704, 2176) | linear("projector.fc2", 4096, 8704)
    keys |= linear("projector.fc3", 4096, 4096)
    keys |= {"language_model.model.embed_tokens.weight": (32064, 4096), "language_model.lm_head.weight": (32064, 4096)}
    keys["language_model.model.norm.weight"] = (4096,)
    for i in range(32):
        layer = f"language_model.model.layers.{i}"
        keys |= {f"{layer}.self_attn.{p}_proj.weight": (4096, 4096) for p in "qkvo"}
        keys |= {f"{layer}.mlp.{p}_proj.weight": (11008, 4096) for p in ("gate", "up")}
        keys[f"{layer}.mlp.down_proj.weight"] = (4096, 11008)
        keys |= {f"{layer}.{n}_layernorm.weight": (4096,) for n in ("input", "post_attention")}
    return keys


@pytest.mark.parametrize("variant", ["oft", "autoregressive"])
def test_keys_and_shapes_are_those_of_the_public_index(variant: str) -> None:
    with torch.device("meta"):
        model = OpenVLAForActionPrediction(OpenVLAConfig(model_variant=variant))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == openvla_7b()
    assert 2 * sum(tensor.numel() for tensor in model.state_dict().values()) == PUBLIC_TOTAL_SIZE


def test_proprio_of_oft_adds_two_layers() -> None:
    with torch.device("meta"):
        model = OpenVLAForActionPrediction(OpenVLAConfig(use_proprio=True, proprio_dim=8))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected = linear("proprio_projector.fc1", 4096, 8) | linear("proprio_projector.fc2", 4096, 4096)
    assert shapes == openvla_7b() | expected


def test_film_adds_two_layers_per_block() -> None:
    with torch.device("meta"):
        model = OpenVLAForActionPrediction(OpenVLAConfig(use_film=True))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected: dict[str, tuple[int, ...]] = {}
    for name, dim, depth in (("featurizer", 1024, 24), ("fused_featurizer", 1152, 27)):
        for i in range(depth):
            for part in ("scale", "shift"):
                expected |= linear(f"vision_backbone.{name}.blocks.{i}.{part}", dim, 4096)
    assert shapes == openvla_7b() | expected

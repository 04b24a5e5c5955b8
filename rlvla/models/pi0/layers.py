"""Parts of pi0's network: norms that a condition may change, decoder layers, and the vision tower."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipEncoder

from rlvla.models.lerobot.layers import Attention
from rlvla.models.pi0.sizes import EPSILON, GemmaSizes, VisionSizes


class AdaptiveNorm(nn.Module):
    """An RMS norm whose scale, shift and gate are a linear function of a condition (adaRMS).

    Args:
        width: of the vectors, and of the condition.
    """

    def __init__(self, width: int):
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, hidden: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """[..., width] and a condition that broadcasts to it -> the normalized vectors, and their gate."""
        scale, shift, gate = self.dense(condition.to(self.dense.weight.dtype)).chunk(3, dim=-1)
        exact = hidden.float()
        normed = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + EPSILON)
        return (normed * (1 + scale.float()) + shift.float()).to(hidden.dtype), gate.to(hidden.dtype)


def _normalize(norm: nn.Module, hidden: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Normalized vectors, and the gate of what is computed from them; None: there is none."""
    if condition is None:
        return norm(hidden), None
    normed, gate = norm(hidden, condition)
    return normed, gate


def _add(hidden: Tensor, added: Tensor, gate: Tensor | None) -> Tensor:
    return hidden + (added if gate is None else added * gate)


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP; tensor names as in transformers' Gemma.

    Args:
        sizes: of the decoder.
        adaptive: whether a condition changes the norms.
    """

    def __init__(self, sizes: GemmaSizes, *, adaptive: bool = False):
        super().__init__()
        config = GemmaConfig(hidden_size=sizes.width, intermediate_size=sizes.mlp_width, hidden_act="gelu_pytorch_tanh")
        self.input_layernorm = make_norm(sizes.width, adaptive=adaptive)
        self.self_attn = Attention(sizes.width, sizes.heads, sizes.kv_heads, sizes.head_dim)
        self.post_attention_layernorm = make_norm(sizes.width, adaptive=adaptive)
        self.mlp = GemmaMLP(config)

    def before_attention(self, hidden: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[..., width] -> normalized, and the gate for `after_attention`."""
        return _normalize(self.input_layernorm, hidden, condition)

    def after_attention(
        self, hidden: Tensor, attended: Tensor, gate: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        """Add the attention's output and the MLP's to the residual stream [..., width]."""
        hidden = _add(hidden, attended, gate)
        normed, gate = _normalize(self.post_attention_layernorm, hidden, condition)
        return _add(hidden, self.mlp(normed), gate)


def make_norm(width: int, *, adaptive: bool) -> nn.Module:
    """A norm of Gemma, or one that a condition changes."""
    return AdaptiveNorm(width) if adaptive else GemmaRMSNorm(width, EPSILON)


class Decoder(nn.Module):
    """Holds layers and the final norm under transformers' names."""

    def __init__(self, sizes: GemmaSizes, *, adaptive: bool = False, vocabulary: int | None = None):
        super().__init__()
        if vocabulary is not None:
            self.embed_tokens = nn.Embedding(vocabulary, sizes.width)
        self.layers = nn.ModuleList(DecoderLayer(sizes, adaptive=adaptive) for _ in range(sizes.depth))
        self.norm = make_norm(sizes.width, adaptive=adaptive)

    def final(self, hidden: Tensor, condition: Tensor | None) -> Tensor:
        """The final norm of [..., width]."""
        return _normalize(self.norm, hidden, condition)[0]


class PatchEmbeddings(nn.Module):
    """Patches with learned positions."""

    def __init__(self, sizes: VisionSizes, image_size: int):
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, sizes.width, kernel_size=sizes.patch_size, stride=sizes.patch_size)
        self.position_embedding = nn.Embedding((image_size // sizes.patch_size) ** 2, sizes.width)

    def forward(self, images: Tensor) -> Tensor:
        """[M, 3, H, W] -> [M, patches, width]."""
        patches: Tensor = self.patch_embedding(images.to(self.patch_embedding.weight.dtype))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class VisionTower(nn.Module):
    """SigLIP without its pooling head."""

    def __init__(self, sizes: VisionSizes, image_size: int):
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=sizes.width,
            intermediate_size=sizes.mlp_width,
            num_hidden_layers=sizes.depth,
            num_attention_heads=sizes.heads,
            layer_norm_eps=EPSILON,
            hidden_act="gelu_pytorch_tanh",
        )
        config._attn_implementation = "sdpa"
        self.embeddings = PatchEmbeddings(sizes, image_size)
        self.encoder = SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(sizes.width, eps=EPSILON)

    def forward(self, images: Tensor) -> Tensor:
        """[M, 3, H, W] in [-1, 1] -> [M, patches, width]."""
        features: Tensor = self.post_layernorm(self.encoder(self.embeddings(images)).last_hidden_state)
        return features

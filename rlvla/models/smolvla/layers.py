"""Decoder layers that the vision-language model and the action expert of SmolVLA have in common."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from rlvla.models.lerobot.layers import Attention
from rlvla.models.smolvla.vlm import DecoderSizes


class Mlp(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, sizes: DecoderSizes):
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.mlp_width, bias=sizes.mlp_bias)
        self.up_proj = nn.Linear(sizes.width, sizes.mlp_width, bias=sizes.mlp_bias)
        self.down_proj = nn.Linear(sizes.mlp_width, sizes.width, bias=sizes.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return down


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP; tensor names as in transformers' Llama."""

    def __init__(self, sizes: DecoderSizes, kv_width: int | None = None):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.width, eps=sizes.eps)
        self.self_attn = Attention(
            sizes.width, sizes.heads, sizes.kv_heads, sizes.head_dim, bias=sizes.attention_bias, kv_width=kv_width
        )
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, eps=sizes.eps)
        self.mlp = Mlp(sizes)

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output and the MLP's to the residual stream [B, L, width]."""
        hidden = hidden + attended
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


class Decoder(nn.Module):
    """Holds layers and the final norm under transformers' names."""

    def __init__(self, layers: list[DecoderLayer], sizes: DecoderSizes, *, vocabulary: int | None = None):
        super().__init__()
        if vocabulary is not None:
            self.embed_tokens = nn.Embedding(vocabulary, sizes.width)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(sizes.width, eps=sizes.eps)

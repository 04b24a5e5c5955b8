"""Decoder layers that the vision-language model and the action expert of SmolVLA have in common."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlvla.models.smolvla.vlm import DecoderSizes

ROPE_BASE = 10_000.0  # SmolVLA's, whatever the configuration of its vision-language model says
Rotation = tuple[Tensor, Tensor]


def rotation(positions: Tensor, head_dim: int) -> Rotation:
    """Cosines and sines [B, 1, L, head_dim / 2] of a rotary position embedding, for positions [B, L]."""
    half = torch.arange(head_dim // 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None, :, None].float() / ROPE_BASE ** (2 * half / head_dim)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, by: Rotation) -> Tensor:
    """Apply a rotary position embedding to [B, h, L, head_dim], in float32."""
    cos, sin = by
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


class Attention(nn.Module):
    """Grouped-query attention to keys and values that the caller puts together.

    Args:
        sizes: of the decoder.
        kv_width: width of what keys and values are projected from; None: that of the decoder.
    """

    def __init__(self, sizes: DecoderSizes, kv_width: int | None = None):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        source, bias = kv_width or sizes.width, sizes.attention_bias
        self.q_proj = nn.Linear(sizes.width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(source, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(source, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, sizes.width, bias=bias)

    def keys_values(self, keys_from: Tensor, values_from: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, L, head_dim], not rotated, from two times [B, L, kv_width]."""
        return self._split(self.k_proj(keys_from)), self._split(self.v_proj(values_from))

    def forward(self, hidden: Tensor, keys: Tensor, values: Tensor, *, at: Rotation, mask: Tensor) -> Tensor:
        """Attend from [B, L, width], rotated to the positions `at`, to keys and values.

        Args:
            hidden: normalized residual stream.
            keys: [B, kv_heads, M, head_dim], rotated as the caller wants.
            values: like keys.
            at: positions of the queries.
            mask: bool, broadcast to [B, 1, L, M]; True where a query may look.
        """
        queries = rotate(self._split(self.q_proj(hidden)), at)
        shared = self.heads // self.kv_heads
        if shared > 1:
            keys, values = (part.repeat_interleave(shared, dim=1) for part in (keys, values))
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        joined: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return joined

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


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
        self.self_attn = Attention(sizes, kv_width)
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

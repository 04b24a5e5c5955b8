"""What the networks of flow-matching policies in LeRobot's format have in common: attention, positions, times."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_BASE = 10_000.0  # whatever the configuration of the vision-language model says
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
    """Grouped-query attention to keys and values that the caller puts together; tensor names are transformers'.

    Args:
        width: of the residual stream.
        heads: of the queries.
        kv_heads: of keys and values.
        head_dim: width of a head.
        bias: whether the projections have biases.
        kv_width: width of what keys and values are projected from; None: `width`.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool = False, kv_width: int | None = None
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        source = kv_width or width
        self.q_proj = nn.Linear(width, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(source, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(source, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=bias)

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
        if self.kv_heads == 1:  # a view, without copies of the prefix
            keys, values = (part.expand(-1, shared, -1, -1) for part in (keys, values))
        elif shared > 1:
            keys, values = (part.repeat_interleave(shared, dim=1) for part in (keys, values))
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        joined: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return joined

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def time_embedding(t: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """Sines and cosines [..., width] float64 of times [...], with periods spaced evenly on a log scale."""
    dtype = torch.float32 if t.device.type == "mps" else torch.float64
    fraction = torch.linspace(0, 1, width // 2, dtype=dtype, device=t.device)
    angles = t.to(dtype)[..., None] * (2 * math.pi / (min_period * (max_period / min_period) ** fraction))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)

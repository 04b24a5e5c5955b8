"""Attention masks and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlvla.utils.errors import ConfigError


@dataclass(frozen=True)
class Attention:
    """Attention over a batch of sequences padded at the end.

    Attributes:
        causal: each position attends to itself and earlier ones; otherwise all real positions attend to each other.
        lengths: [B] number of real positions in each sequence; None if none is padded.
        implementation: "sdpa" (torch) or "flash_attention_2" (the flash-attn package, GPUs only).
    """

    causal: bool = False
    lengths: Tensor | None = None
    implementation: str = "sdpa"

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, read: Tensor | slice | None = None) -> Tensor:
        """Attended values [B, heads, R, d].

        Args:
            query: [B, heads, R, d].
            key: [B, heads, S, d].
            value: [B, heads, S, d].
            read: positions of the queries, a slice or indices [B, R]; None for all S positions. With the flash kernel
                and a causal mask they must be the last R real ones.
        """
        if self.implementation == "flash_attention_2":
            return self._flash(query, key, value, queries_are_padded=read is None)
        if self.causal and read is None:  # padding comes after every real query
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self._mask(key, read))

    def _mask(self, key: Tensor, read: Tensor | slice | None) -> Tensor | None:
        """Bool, broadcast to [B, heads, R, S]; True where a query may attend to a position."""
        positions = torch.arange(key.shape[2], device=key.device)
        if self.causal:
            reading = positions[read] if isinstance(read, slice) else read
            allowed = positions <= reading[..., None]
            return allowed if isinstance(read, slice) else allowed[:, None]
        return None if self.lengths is None else (positions < self.lengths[:, None])[:, None, None]

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, *, queries_are_padded: bool) -> Tensor:
        flash = require_flash_attention()
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [B, tokens, heads, d]
        if self.lengths is None:
            return flash.flash_attn_func(query, key, value, causal=self.causal).transpose(1, 2)
        real = torch.arange(key.shape[1], device=key.device) < self.lengths[:, None]
        asked = real if queries_are_padded else torch.ones(query.shape[:2], dtype=torch.bool, device=key.device)
        packed = flash.flash_attn_varlen_func(
            query[asked],
            key[real],
            value[real],
            _boundaries(asked),
            _boundaries(real),
            query.shape[1],
            key.shape[1],
            causal=self.causal,
        )
        return query.new_zeros(query.shape).masked_scatter(asked[..., None, None], packed).transpose(1, 2)


def _boundaries(mask: Tensor) -> Tensor:
    """Cumulative count of True over rows, [B + 1] int32 (`cu_seqlens` of the packed kernel)."""
    return F.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def require_flash_attention() -> Any:
    """The flash-attn package; raises ConfigError if it cannot be imported."""
    try:
        import flash_attn
    except ImportError as error:
        raise ConfigError(
            f"attn_implementation flash_attention_2 needs the flash-attn package, which cannot be used here ({error}); "
            "install it or use sdpa"
        ) from error
    return flash_attn

"""The Llama decoder: modules and tensor names of `LlamaForCausalLM` with a custom forward pass, and attention kernels.

The last layer computes queries, MLP and norm only at the positions whose output is read, and the cache for
autoregressive decoding batches prompts of different lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm

from rlvla.utils.errors import ConfigError


class FusedRMSNorm(LlamaRMSNorm):
    """Llama's norm; on a GPU in a single kernel, which rounds once instead of twice."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., d], normalized and scaled."""
        if hidden.is_cuda:
            return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)
        normed: Tensor = super().forward(hidden)
        return normed


class ActionTokenHead(nn.Linear):
    """A language model head that computes logits only for the action tokens."""

    def __init__(self, hidden_size: int, vocab_size: int, first_row: int, num_rows: int):
        super().__init__(hidden_size, vocab_size, bias=False)
        self.first_row = first_row
        self.num_rows = num_rows

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> logits [..., num_rows]; column k belongs to token `first_row + k`."""
        return F.linear(hidden, self.weight[self.first_row : self.first_row + self.num_rows])


def build_language_model(config: LlamaConfig, first_action_row: int, num_action_rows: int) -> LlamaForCausalLM:
    """A `LlamaForCausalLM` whose head computes logits only for the action tokens.

    Raises:
        ConfigError: the decoder uses features that Llama-2 does not have.
    """
    problems = []
    if rope_settings(config)[1] != "default":
        problems.append(f"text_config: rope type {rope_settings(config)[1]!r} is not supported; only the default is")
    if config.attention_bias or config.mlp_bias or config.tie_word_embeddings:
        problems.append("text_config: attention_bias, mlp_bias and tie_word_embeddings must be false as in Llama-2")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.hidden_size % config.num_attention_heads or head_dim % 2:
        problems.append(
            f"text_config: hidden_size {config.hidden_size} does not split into {config.num_attention_heads} heads "
            "of an even width; change one of them"
        )
    if problems:
        raise ConfigError(problems)
    language_model = LlamaForCausalLM(config)
    for module in language_model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = FusedRMSNorm
    # Replaced by `rotary_tables`; its buffers are in no checkpoint, so they would stay on the meta device.
    del language_model.model.rotary_emb
    language_model.lm_head = ActionTokenHead(config.hidden_size, config.vocab_size, first_action_row, num_action_rows)
    return language_model


def rope_settings(config: LlamaConfig) -> tuple[float, str]:
    """Rotary base and type, wherever this version of transformers stores them."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    return float(theta), parameters.get("rope_type", parameters.get("type", "default"))


def rotary_tables(config: LlamaConfig, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine [length, head_dim] for positions 0 to length - 1; angles are computed in float32.

    The first half of the sine is negated, so that the rotation is `x * cos + swap_halves(x) * sin` (RoFormer,
    arXiv 2104.09864, in Llama's half-split layout).
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] / rope_settings(config)[0] ** exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@dataclass
class LayerCache:
    """Rotated keys and values of one layer, [B, heads, S + room, d]; sequences in a batch may differ in length.

    Attributes:
        room: free positions to reserve after the sequences.
    """

    room: int
    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of the whole sequences, [B, heads, S, d]."""
        self.keys, self.values = F.pad(keys, (0, 0, 0, self.room)), F.pad(values, (0, 0, 0, self.room))

    def extend(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Add one key and value [B, heads, 1, d] at `positions` [B, 1]; returns the whole cache."""
        rows = torch.arange(len(positions), device=positions.device)
        self.keys[rows, :, positions[:, 0]] = keys[:, :, 0]
        self.values[rows, :, positions[:, 0]] = values[:, :, 0]
        return self.keys, self.values


def decoder_layer(
    layer: LlamaDecoderLayer,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention: Attention,
    read: Tensor | slice | None = None,
    cache: LayerCache | None = None,
) -> Tensor:
    """One Llama layer over whole sequences.

    Args:
        layer: the layer.
        hidden: [B, S, d].
        cos: [S, head_dim].
        sin: [S, head_dim], signed as in `rotary_tables`.
        attention: mask and kernel.
        read: positions to output: a slice, an index tensor [B, R], or None for all.
        cache: stores the keys and values.

    Returns:
        [B, R, d] (R = S if `read` is None).
    """
    normed = layer.input_layernorm(hidden)
    key, value = _keys_and_values(layer.self_attn, normed, cos, sin)
    if cache is not None:
        cache.store(key, value)
    if read is not None:
        hidden, normed = take_positions(hidden, read), take_positions(normed, read)
        cos, sin = _rows_of(cos, read), _rows_of(sin, read)
    return _attend_and_feed(layer, hidden, normed, (cos, sin), key, value, attention, read)


def decoder_step(
    layer: LlamaDecoderLayer,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache: LayerCache,
    kernel: str,
) -> Tensor:
    """One Llama layer for one more token of each sequence: hidden [B, 1, d] at `positions` [B, 1] -> [B, 1, d]."""
    normed = layer.input_layernorm(hidden)
    cos, sin = _rows_of(cos, positions), _rows_of(sin, positions)
    key, value = cache.extend(*_keys_and_values(layer.self_attn, normed, cos, sin), positions)
    attention = Attention(causal=False, lengths=positions[:, 0] + 1, implementation=kernel)
    return _attend_and_feed(layer, hidden, normed, (cos, sin), key, value, attention, positions)


def _keys_and_values(attention: LlamaAttention, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, _ = normed.shape
    key = attention.k_proj(normed).view(batch, length, -1, attention.head_dim).transpose(1, 2)
    value = attention.v_proj(normed).view(batch, length, -1, attention.head_dim).transpose(1, 2)
    return _rotate(key, cos, sin), value


def _attend_and_feed(
    layer: LlamaDecoderLayer,
    hidden: Tensor,
    normed: Tensor,
    rotary: tuple[Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    attention: Attention,
    read: Tensor | slice | None,
) -> Tensor:
    """The layer's output at the positions of `hidden` [B, R, d]."""
    block = layer.self_attn
    batch, reads, _ = hidden.shape
    query = block.q_proj(normed).view(batch, reads, -1, block.head_dim).transpose(1, 2)
    query = _rotate(query, *rotary)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mixed = attention(query, key, value, read)
    hidden = hidden + block.o_proj(mixed.transpose(1, 2).reshape(batch, reads, -1))
    normed = layer.post_attention_layernorm(hidden)
    return hidden + layer.mlp(normed)


def _rows_of(table: Tensor, positions: Tensor | slice) -> Tensor:
    """Rows of a rotary table [S, head_dim] for queries: [R, head_dim] for a slice, [B, 1, R, head_dim] for indices."""
    return table[positions] if isinstance(positions, slice) else table[positions][:, None]


def take_positions(hidden: Tensor, positions: Tensor | slice) -> Tensor:
    """[B, S, d] -> [B, R, d] at a slice or at positions [B, R]."""
    if isinstance(positions, slice):
        return hidden[:, positions]
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))


def decode(
    language_model: LlamaForCausalLM,
    embeddings: Tensor,
    attention: Attention,
    read: Tensor | slice,
    rotary: tuple[Tensor, Tensor],
    *,
    recompute: bool = False,
    caches: list[LayerCache] | None = None,
) -> Tensor:
    """Normed hidden states [B, R, d] at the positions `read`.

    Args:
        language_model: from `build_language_model`.
        embeddings: [B, S, d].
        attention: mask and kernel.
        read: positions to return, see `decoder_layer`.
        rotary: tables of length S from `rotary_tables`.
        recompute: drop activations and recompute them in the backward pass (gradient checkpointing).
        caches: one per layer, to continue with `decode_next`.
    """
    layers, hidden = _layers(language_model), embeddings
    for i, layer in enumerate(layers):
        positions, cache = read if i == len(layers) - 1 else None, caches[i] if caches else None
        arguments = (layer, hidden, *rotary, attention, positions, cache)
        hidden = checkpoint(decoder_layer, *arguments, use_reentrant=False) if recompute else decoder_layer(*arguments)
    return language_model.model.norm(hidden)


def decode_next(
    language_model: LlamaForCausalLM,
    embeddings: Tensor,
    positions: Tensor,
    rotary: tuple[Tensor, Tensor],
    caches: list[LayerCache],
    kernel: str,
) -> Tensor:
    """Normed hidden states [B, 1, d] for one more token per sequence.

    Args:
        language_model: from `build_language_model`.
        embeddings: [B, 1, d].
        positions: [B, 1] int64, position of each token in its sequence.
        rotary: tables that cover the last position.
        caches: filled by `decode`; the new keys and values are added.
        kernel: attention implementation.
    """
    hidden = embeddings
    for layer, cache in zip(_layers(language_model), caches):
        hidden = decoder_step(layer, hidden, *rotary, positions, cache, kernel)
    return language_model.model.norm(hidden)


def _layers(language_model: LlamaForCausalLM) -> list[LlamaDecoderLayer]:
    return cast("list[LlamaDecoderLayer]", list(language_model.model.layers))


@dataclass(frozen=True)
class Attention:
    """Attention over a batch of sequences padded at the end.

    Attributes:
        causal: each position attends to itself and earlier ones; else to all real positions.
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
            if isinstance(read, slice):
                return positions <= positions[read][..., None]
            assert read is not None  # causal attention over whole sequences needs no mask
            return (positions <= read[..., None])[:, None]
        return None if self.lengths is None else (positions < self.lengths[:, None])[:, None, None]

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, *, queries_are_padded: bool) -> Tensor:
        flash = require_flash_attention()
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [B, tokens, heads, d]
        if self.lengths is None:
            return flash.flash_attn_func(query, key, value, causal=self.causal).transpose(1, 2)
        real = torch.arange(key.shape[1], device=key.device) < self.lengths[:, None]
        queries = real if queries_are_padded else torch.ones(query.shape[:2], dtype=torch.bool, device=key.device)
        packed = flash.flash_attn_varlen_func(
            query[queries],
            key[real],
            value[real],
            _boundaries(queries),
            _boundaries(real),
            query.shape[1],
            key.shape[1],
            causal=self.causal,
        )
        return query.new_zeros(query.shape).masked_scatter(queries[..., None, None], packed).transpose(1, 2)


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

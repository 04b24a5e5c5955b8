"""The Llama decoder over one bidirectional sequence: Hugging Face's modules and tensor names, a lean forward pass.

The modules are those of `LlamaForCausalLM`, so checkpoints, LoRA and ZeRO see what they expect. The loop over the
layers is written here because parallel decoding needs no cache and no mask construction, and because in the last layer
only the positions whose output is read need a query, an MLP and a norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from rlvla.utils.errors import ConfigError


class ActionHead(nn.Linear):
    """A language model head of which only the rows of the action tokens are multiplied."""

    def __init__(self, hidden_size: int, vocab_size: int, first_row: int, num_rows: int):
        super().__init__(hidden_size, vocab_size, bias=False)
        self.first_row = first_row
        self.num_rows = num_rows

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> logits [..., num_rows]; column k belongs to token `first_row + k`."""
        return F.linear(hidden, self.weight[self.first_row : self.first_row + self.num_rows])


def build_language_model(config: LlamaConfig, first_action_row: int, num_action_rows: int) -> LlamaForCausalLM:
    """A `LlamaForCausalLM` whose head multiplies only the action rows.

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
    # Unused here (`rotary_tables`), and its buffers are in no checkpoint, so they would stay on the meta device.
    del language_model.model.rotary_emb
    language_model.lm_head = ActionHead(config.hidden_size, config.vocab_size, first_action_row, num_action_rows)
    return language_model


def rope_settings(config: LlamaConfig) -> tuple[float, str]:
    """Rotary base and type, wherever this version of transformers keeps them."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    return float(theta), parameters.get("rope_type", parameters.get("type", "default"))


def rotary_tables(config: LlamaConfig, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine [length, head_dim] of sequential positions.

    The first half of the sine is negated, so that a rotation is `x * cos + swap_halves(x) * sin` (RoFormer,
    arXiv 2104.09864, in Llama's half-split layout). Angles are computed in float32 whatever `dtype` is.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] / rope_settings(config)[0] ** exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def decoder_layer(
    layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, read: Tensor | slice | None = None
) -> Tensor:
    """One Llama layer with attention over all unmasked positions.

    Args:
        layer: a `LlamaDecoderLayer`.
        hidden: [B, S, d].
        cos: [S, head_dim].
        sin: [S, head_dim], signed as in `rotary_tables`.
        mask: bool [B, 1, 1, S], True where a position may be attended to; None when all may.
        read: positions whose output is wanted: a slice, an index tensor [B, R], or None for all.

    Returns:
        [B, R, d] (R = S when `read` is None).
    """
    attention = layer.self_attn
    batch, length, _ = hidden.shape
    normed = layer.input_layernorm(hidden)
    key = attention.k_proj(normed).view(batch, length, -1, attention.head_dim).transpose(1, 2)
    value = attention.v_proj(normed).view(batch, length, -1, attention.head_dim).transpose(1, 2)
    key = _rotate(key, cos, sin)
    if read is not None:
        hidden, normed = take_positions(hidden, read), take_positions(normed, read)
        if isinstance(read, slice):
            cos, sin = cos[read], sin[read]
        else:
            cos, sin = cos[read][:, None], sin[read][:, None]
    reads = hidden.shape[1]
    query = attention.q_proj(normed).view(batch, reads, -1, attention.head_dim).transpose(1, 2)
    query = _rotate(query, cos, sin)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    hidden = hidden + attention.o_proj(mixed.transpose(1, 2).reshape(batch, reads, -1))
    normed = layer.post_attention_layernorm(hidden)
    return hidden + layer.mlp(normed)


def take_positions(hidden: Tensor, positions: Tensor | slice) -> Tensor:
    """[B, S, d] -> [B, R, d] at a slice or at positions [B, R]."""
    if isinstance(positions, slice):
        return hidden[:, positions]
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))


def decode_bidirectional(
    language_model: nn.Module,
    embeddings: Tensor,
    mask: Tensor | None,
    read: Tensor | slice,
    rotary: tuple[Tensor, Tensor],
    *,
    recompute: bool = False,
) -> Tensor:
    """Normed hidden states [B, R, d] at the positions `read`, attention being bidirectional.

    Args:
        language_model: the module of `build_language_model`.
        embeddings: [B, S, d].
        mask: bool [B, 1, 1, S] or None, see `decoder_layer`.
        read: positions to return, see `decoder_layer`.
        rotary: tables of length S from `rotary_tables`.
        recompute: drop activations and recompute them in the backward pass (gradient checkpointing).
    """
    decoder = language_model.model
    hidden = embeddings
    last = len(decoder.layers) - 1
    for i, layer in enumerate(decoder.layers):
        arguments = (layer, hidden, *rotary, mask, read if i == last else None)
        hidden = checkpoint(decoder_layer, *arguments, use_reentrant=False) if recompute else decoder_layer(*arguments)
    return decoder.norm(hidden)

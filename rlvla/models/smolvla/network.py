"""The network of SmolVLA: SmolVLM, and an expert whose layers attend to the prefix alone or also to the actions."""

from __future__ import annotations

import copy
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMEncoder

from rlvla.models.lerobot.network import (
    FlowDecoder,
    FlowDecoderLayer,
    FlowNetwork,
    GroupedQueryAttention,
    Prefix,
    Rotation,
    Scope,
    chunk_mask,
    masked_mean_states,
    rotate,
    rotation,
)
from rlvla.models.smolvla.config import ExpertLayer, SmolVLAConfig, expert_layers
from rlvla.models.smolvla.vlm import DecoderSizes, VlmConfig

VLM = "model.vlm_with_expert.vlm."


class SmolVLMPatchEmbeddings(nn.Module):
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


class SmolVLMVisionTower(nn.Module):
    """A SigLIP tower; arguments as for `SmolVLMPatchEmbeddings`."""

    def __init__(self, vlm: VlmConfig, *, shifted: bool = False):
        super().__init__()
        config = copy.deepcopy(vlm.vision)
        config._attn_implementation = "sdpa"
        self.embeddings = SmolVLMPatchEmbeddings(vlm, shifted=shifted)
        self.encoder = SmolVLMEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        """[M, 3, H, W] in [-1, 1] -> [M, patches, width]."""
        images = images.to(self.embeddings.patch_embedding.weight.dtype)
        features: Tensor = self.post_layernorm(self.encoder(self.embeddings(images)).last_hidden_state)
        return features


class SmolVLMConnector(nn.Module):
    """Pixel shuffle, then a projection to the width of the decoder."""

    def __init__(self, vlm: VlmConfig):
        super().__init__()
        self.scale = vlm.scale_factor
        shuffled = vlm.vision.hidden_size * self.scale**2
        self.modality_projection = Scope(proj=nn.Linear(shuffled, vlm.text.width, bias=False))

    def forward(self, features: Tensor) -> Tensor:
        """[M, patches, d] of a square image -> [M, patches / s^2, width]; s x s neighbors become one token."""
        side = round(features.shape[1] ** 0.5)
        blocks = features.unflatten(1, (side // self.scale, self.scale, side // self.scale, self.scale))
        tokens = blocks.transpose(2, 3).flatten(3).flatten(1, 2)
        projected: Tensor = self.modality_projection.proj(tokens)
        return projected


class GatedMlp(nn.Module):
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


def decoder_layer(sizes: DecoderSizes, kv_width: int | None = None) -> FlowDecoderLayer:
    """A layer of Llama; `kv_width` as for `GroupedQueryAttention`."""
    shape = (sizes.width, sizes.heads, sizes.kv_heads, sizes.head_dim)
    attention = GroupedQueryAttention(*shape, bias=sizes.attention_bias, kv_width=kv_width)
    return FlowDecoderLayer(attention, GatedMlp(sizes), lambda: nn.RMSNorm(sizes.width, eps=sizes.eps))


class SmolVLANetwork(FlowNetwork):
    """SmolVLA's two towers, with the tensor names and shapes of LeRobot's files.

    Args:
        config: of the policy.
        vlm: sizes of its vision-language model.
        shifted_positions: positions of image patches as in LeRobot 0.4.4; see `SmolVLMPatchEmbeddings`.

    Raises:
        ConfigError: incompatible numbers of layers.
    """

    vlm: ClassVar = VLM
    language: ClassVar = f"{VLM}model.text_model."
    vision: ClassVar = f"{VLM}model.vision_model."
    pooled_parts: ClassVar = ("vision", "language", "state")

    config: SmolVLAConfig

    def __init__(self, config: SmolVLAConfig, vlm: VlmConfig, *, shifted_positions: bool = False):
        super().__init__()
        self.config, self.head_dim = config, vlm.text.head_dim
        count = min(config.num_vlm_layers, vlm.layers) if config.num_vlm_layers > 0 else vlm.layers
        self.plan: tuple[ExpertLayer, ...] = expert_layers(config, count)
        self.last_vlm_layer = self.plan[-1].vlm_layer
        expert = vlm.text.expert(config.expert_width_multiplier)
        self.prefix_width, self.expert_width = vlm.text.width, expert.width
        width, kv_width = expert.width, vlm.text.kv_heads * vlm.text.head_dim
        language_model = FlowDecoder(
            [decoder_layer(vlm.text) for _ in range(count)],
            nn.RMSNorm(vlm.text.width, eps=vlm.text.eps),
            nn.Embedding(vlm.vocabulary, vlm.text.width),
        )
        smolvlm = Scope(
            model=Scope(
                vision_model=SmolVLMVisionTower(vlm, shifted=shifted_positions),
                connector=SmolVLMConnector(vlm),
                text_model=language_model,
            ),
            lm_head=nn.Linear(vlm.text.width, vlm.vocabulary, bias=False),  # for words; never used
        )
        layers = [decoder_layer(expert, None if at.attends_to_actions else kv_width) for at in self.plan]
        lm_expert = FlowDecoder(layers, nn.RMSNorm(width, eps=expert.eps))
        self.model = Scope(
            vlm_with_expert=Scope(vlm=smolvlm, lm_expert=lm_expert),
            state_proj=nn.Linear(config.max_state_dim, vlm.text.width),
            action_in_proj=nn.Linear(config.max_action_dim, width),
            action_out_proj=nn.Linear(width, config.max_action_dim),
            action_time_mlp_in=nn.Linear(2 * width, width),
            action_time_mlp_out=nn.Linear(width, width),
        )

    @property
    def smolvlm(self) -> Scope:
        """Vision tower, connector and decoder of the vision-language model."""
        smolvlm: Scope = self.model.vlm_with_expert.vlm.model
        return smolvlm

    @property
    def expert(self) -> FlowDecoder:
        """See `FlowNetwork.expert`."""
        expert: FlowDecoder = self.model.vlm_with_expert.lm_expert
        return expert

    def set_trainable(self, **choice: bool | None) -> None:
        """See `FlowNetwork.set_trainable`; config.json decides about the projection of the state.

        With a frozen vision-language model only the state's token is then kept in the graph.
        """
        super().set_trainable(**choice)
        if not self.config.train_state_proj:
            self.model.state_proj.requires_grad_(False)

    def prefix(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor) -> Prefix:
        """See `FlowNetwork.prefix`."""
        embedded, embedded_mask = self._embed(images, image_mask, tokens, token_mask)
        state_proj = self.model.state_proj
        state = state_proj(state.to(state_proj.weight.dtype))[:, None].to(embedded.dtype)
        keys, values, mask, pooled = self._encode(embedded, embedded_mask, state)
        expert_keys, expert_values = [], []
        for at, layer in zip(self.plan, self.expert.stack):
            key, value = keys[at.vlm_layer], values[at.vlm_layer]
            if not at.attends_to_actions:
                weight = layer.self_attn.k_proj.weight
                key, value = layer.self_attn.keys_values(
                    *(part.transpose(1, 2).flatten(2).to(weight.dtype) for part in (key, value))
                )
            expert_keys.append(key)
            expert_values.append(value)
        return Prefix(tuple(expert_keys), tuple(expert_values), mask, mask.sum(dim=1), pooled)

    def _embed(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Image and language tokens [B, P - 1, d], and their mask."""
        smolvlm, count = self.smolvlm, images.shape[1]
        patches = smolvlm.connector(smolvlm.vision_model(images.flatten(0, 1)))
        text = smolvlm.text_model.embed_tokens(tokens)
        embedded = torch.cat([patches.unflatten(0, (-1, count)).flatten(1, 2).to(text.dtype), text], dim=1)
        mask = torch.cat([image_mask.repeat_interleave(patches.shape[1], dim=1), token_mask], dim=1)
        return embedded * math.sqrt(embedded.shape[-1]), mask

    def _encode(
        self, embedded: Tensor, embedded_mask: Tensor, state: Tensor
    ) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """Keys and values of every layer that is read, the mask, and the pooled hidden states.

        Images and text do not attend to the state. Padded queries attend like others, so that no row lacks keys;
        nothing reads their output.
        """
        mask = torch.cat([embedded_mask, embedded_mask.new_ones(len(embedded_mask), 1)], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        turn = rotation(positions, self.head_dim)
        decoder: FlowDecoder = self.smolvlm.text_model
        count = self.last_vlm_layer + 1
        only_state = torch.is_grad_enabled() and state.requires_grad and not embedded.requires_grad
        if only_state and not any(p.requires_grad for p in self.smolvlm.parameters()):
            # Only the state's token depends on trained weights: keep it alone in the graph.
            first, last = (_tokens(turn, part) for part in (slice(None, -1), slice(-1, None)))
            keys, values, hidden = decoder.encode(embedded, at=first, mask=embedded_mask[:, None, None], count=count)
            before = (keys, values)
            keys, values, state = decoder.encode(state, at=last, mask=mask[:, None, None], count=count, before=before)
            hidden = torch.cat([hidden, state], dim=1)
        else:
            allowed = mask[:, None, None].expand(-1, 1, mask.shape[1], -1).clone()
            allowed[:, :, :-1, -1] = False
            tokens = torch.cat([embedded, state], dim=1)
            keys, values, hidden = decoder.encode(tokens, at=turn, mask=allowed, count=count)
        return keys, values, mask, masked_mean_states(hidden, mask)

    def expert_states(self, prefix: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """See `FlowNetwork.expert_states`; actions attend to earlier ones of their evaluation."""
        evaluations, actions = x.shape[1:3]
        hidden = self.fuse_time(*self.embed_actions(x, t)).flatten(1, 2)
        step, to_both = chunk_mask(prefix.mask, evaluations, actions, causal=True)
        after_prefix = rotation(prefix.length[:, None] + step, self.head_dim)
        from_zero = rotation(step[None], self.head_dim)
        to_prefix = prefix.mask[:, None, None]
        for at, layer, keys, values in zip(self.plan, self.expert.stack, prefix.keys, prefix.values):
            normed, _ = layer.before_attention(hidden)
            if at.attends_to_actions:
                action_keys, action_values = layer.self_attn.keys_values(normed, normed)
                keys = torch.cat([keys.to(action_keys.dtype), rotate(action_keys, after_prefix)], dim=2)
                values = torch.cat([values.to(action_values.dtype), action_values], dim=2)
                attended = layer.self_attn(normed, keys, values, at=after_prefix, mask=to_both)
            else:
                attended = layer.self_attn(normed, keys, values, at=from_zero, mask=to_prefix)
            hidden = layer.after_attention(hidden, attended)
        states: Tensor = self.expert.norm(hidden)
        return states.unflatten(1, (evaluations, actions))


def _tokens(turn: Rotation, part: slice) -> Rotation:
    """The rotation of some of the tokens."""
    return turn[0][..., part, :], turn[1][..., part, :]

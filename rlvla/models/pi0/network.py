"""The network of pi0 and pi0.5: PaliGemma, and a Gemma expert whose actions all see each other."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipEncoder

from rlvla.models.lerobot.network import (
    FlowDecoder,
    FlowDecoderLayer,
    FlowNetwork,
    GroupedQueryAttention,
    Prefix,
    Scope,
    chunk_mask,
    masked_mean_states,
    normalize,
    rotate,
    rotation,
)
from rlvla.models.pi0.config import EPSILON, GemmaSizes, Pi0Config, Sizes, VisionSizes

VLM = "model.paligemma_with_expert.paligemma."


class GemmaNorm(GemmaRMSNorm):
    """Gemma's norm; on a GPU with the fused RMS norm."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., width], normalized and scaled."""
        if hidden.is_cuda:
            return F.rms_norm(hidden.float(), hidden.shape[-1:], 1 + self.weight.float(), self.eps).to(hidden.dtype)
        normed: Tensor = super().forward(hidden)
        return normed


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


def gemma_decoder(sizes: GemmaSizes, *, adaptive: bool = False, vocabulary: int | None = None) -> FlowDecoder:
    """A Gemma decoder.

    Args:
        sizes: of the decoder.
        adaptive: whether a condition changes the norms.
        vocabulary: rows of its embedding; None: it has none.
    """
    norm = partial(AdaptiveNorm, sizes.width) if adaptive else partial(GemmaNorm, sizes.width, EPSILON)
    config = GemmaConfig(hidden_size=sizes.width, intermediate_size=sizes.mlp_width, hidden_act="gelu_pytorch_tanh")
    shape = (sizes.width, sizes.heads, sizes.kv_heads, sizes.head_dim)
    layers = [FlowDecoderLayer(GroupedQueryAttention(*shape), GemmaMLP(config), norm) for _ in range(sizes.depth)]
    return FlowDecoder(layers, norm(), None if vocabulary is None else nn.Embedding(vocabulary, sizes.width))


class SiglipPatchEmbeddings(nn.Module):
    """Patches with learned positions."""

    def __init__(self, sizes: VisionSizes, image_size: int):
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, sizes.width, kernel_size=sizes.patch_size, stride=sizes.patch_size)
        self.position_embedding = nn.Embedding((image_size // sizes.patch_size) ** 2, sizes.width)

    def forward(self, images: Tensor) -> Tensor:
        """[M, 3, H, W] -> [M, patches, width]."""
        patches: Tensor = self.patch_embedding(images.to(self.patch_embedding.weight.dtype))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class SiglipTower(nn.Module):
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
        self.embeddings = SiglipPatchEmbeddings(sizes, image_size)
        self.encoder = SiglipEncoder(config)  # type: ignore[arg-type]  # annotated with the config of both towers
        self.post_layernorm = nn.LayerNorm(sizes.width, eps=EPSILON)

    def forward(self, images: Tensor) -> Tensor:
        """[M, 3, H, W] in [-1, 1] -> [M, patches, width]."""
        features: Tensor = self.post_layernorm(self.encoder(self.embeddings(images)).last_hidden_state)
        return features


class Pi0Network(FlowNetwork):
    """The two towers of pi0 or pi0.5, with the tensor names and shapes of LeRobot's files.

    The heads for words, which are never used, are left out.

    Args:
        config: of the policy.
        sizes: of its parts.
    """

    vlm: ClassVar = VLM
    language: ClassVar = f"{VLM}model.language_model."
    vision: ClassVar = f"{VLM}model.vision_tower."

    config: Pi0Config

    def __init__(self, config: Pi0Config, sizes: Sizes):
        super().__init__()
        self.config, self.sizes = config, sizes
        self.prefix_width, self.expert_width = sizes.vlm.width, sizes.expert.width
        self.last_vlm_layer = sizes.vlm.depth - 1
        paligemma = Scope(
            vision_tower=Scope(vision_model=SiglipTower(sizes.vision, config.image_size)),
            multi_modal_projector=Scope(linear=nn.Linear(sizes.vision.width, sizes.vlm.width)),
            language_model=gemma_decoder(sizes.vlm, vocabulary=sizes.vocabulary),
        )
        expert = gemma_decoder(sizes.expert, adaptive=config.state_in_prompt)
        width = sizes.expert.width
        if config.state_in_prompt:
            time = {"time_mlp_in": nn.Linear(width, width), "time_mlp_out": nn.Linear(width, width)}
        else:
            time = {
                "state_proj": nn.Linear(config.max_state_dim, width),
                "action_time_mlp_in": nn.Linear(2 * width, width),
                "action_time_mlp_out": nn.Linear(width, width),
            }
        self.model = Scope(
            paligemma_with_expert=Scope(paligemma=Scope(model=paligemma), gemma_expert=Scope(model=expert)),
            action_in_proj=nn.Linear(config.max_action_dim, width),
            action_out_proj=nn.Linear(width, config.max_action_dim),
            **time,
        )

    @property
    def expert(self) -> FlowDecoder:
        """See `FlowNetwork.expert`."""
        expert: FlowDecoder = self.model.paligemma_with_expert.gemma_expert.model
        return expert

    def prefix(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor) -> Prefix:
        """See `FlowNetwork.prefix`.

        In pi0 the last token is the state's: the expert computes its keys and values, which are the same for all noisy
        actions, because it does not see them.
        """
        prefix = self._encode(images, image_mask, tokens, token_mask)
        return prefix if self.config.state_in_prompt else self._with_state(prefix, state)

    def _encode(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor) -> Prefix:
        """Keys and values of images and text, which all see each other.

        Padded queries attend like others, so that no row lacks keys; nothing reads their output.
        """
        paligemma = self.model.paligemma_with_expert.paligemma.model
        decoder: FlowDecoder = paligemma.language_model
        patches = paligemma.vision_tower.vision_model(images.flatten(0, 1))
        embedded = paligemma.multi_modal_projector.linear(patches).unflatten(0, images.shape[:2])
        text = decoder.embed_tokens(tokens) * math.sqrt(self.sizes.vlm.width)
        hidden = torch.cat([embedded.flatten(1, 2).to(text.dtype), text], dim=1)
        mask = torch.cat([image_mask.repeat_interleave(patches.shape[1], dim=1), token_mask], dim=1)
        turn = rotation((mask.cumsum(dim=1) - 1).clamp(min=0), self.sizes.vlm.head_dim)
        keys, values, hidden = decoder.encode(hidden, at=turn, mask=mask[:, None, None])
        return Prefix(tuple(keys), tuple(values), mask, mask.sum(dim=1), masked_mean_states(hidden, mask))

    def _with_state(self, prefix: Prefix, state: Tensor) -> Prefix:
        """Append the state's token, which sees the prefix and itself."""
        state_proj = self.model.state_proj
        hidden = state_proj(state.to(state_proj.weight.dtype))[:, None].to(self.expert.dtype)
        turn = rotation(prefix.length[:, None], self.sizes.expert.head_dim)
        mask = torch.cat([prefix.mask, prefix.mask.new_ones(len(state), 1)], dim=1)
        before = (prefix.keys, prefix.values)
        keys, values, _ = self.expert.encode(hidden, at=turn, mask=mask[:, None, None], before=before)
        return Prefix(tuple(keys), tuple(values), mask, prefix.length + 1, prefix.pooled)

    def expert_states(self, prefix: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """See `FlowNetwork.expert_states`; the actions of one evaluation all see each other."""
        evaluations, actions = x.shape[1:3]
        hidden, condition = self._action_tokens(x, t)
        step, mask = chunk_mask(prefix.mask, evaluations, actions, causal=False)
        turn = rotation(prefix.length[:, None] + step, self.sizes.expert.head_dim)
        for layer, keys, values in zip(self.expert.stack, prefix.keys, prefix.values):
            normed, gate = layer.before_attention(hidden, condition)
            normed = normed.flatten(1, 2)
            action_keys, action_values = layer.self_attn.keys_values(normed, normed)
            keys = torch.cat([keys.to(action_keys.dtype), rotate(action_keys, turn)], dim=2)
            values = torch.cat([values.to(action_values.dtype), action_values], dim=2)
            attended = layer.self_attn(normed, keys, values, at=turn, mask=mask)
            hidden = layer.after_attention(hidden, attended.view_as(hidden), gate, condition)
        return normalize(self.expert.norm, hidden, condition)[0]

    def _action_tokens(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Noisy actions and times -> [B, R, C, width], and for pi0.5 the condition of the norms [B, R, 1, width]."""
        actions, times = self.embed_actions(x, t)
        if not self.config.state_in_prompt:
            return self.fuse_time(actions, times), None
        condition = F.silu(self.model.time_mlp_out(F.silu(self.model.time_mlp_in(times))))
        return actions.to(self.expert.dtype), condition

"""Base of flow-matching networks in LeRobot's format: a prefix encoded once per decision, an expert that denoises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlvla.models.lerobot.config import LeRobotConfig

ROPE_BASE = 10_000.0  # as in LeRobot, regardless of the vision-language model's configuration
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Prefix:
    """Encoded observations of B decisions, read by the action expert.

    Attributes:
        keys: for each layer of the expert [B, kv_heads, P, head_dim], with position and projections applied.
        values: like keys.
        mask: [B, P] bool: False for padding and missing cameras.
        length: [B] int64, number of unmasked tokens: the position of the first action.
        pooled: [B, d] float32, mean of the hidden states that enter the last layer over the unmasked tokens; for a
            critic.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor
    length: Tensor
    pooled: Tensor

    def __len__(self) -> int:
        """B."""
        return len(self.mask)

    @property
    def device(self) -> torch.device:
        """Of the tensors."""
        return self.mask.device


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


def time_embedding(t: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """Sines and cosines [..., width] float64 of times [...], with periods spaced evenly on a log scale."""
    dtype = torch.float32 if t.device.type == "mps" else torch.float64
    fraction = torch.linspace(0, 1, width // 2, dtype=dtype, device=t.device)
    angles = t.to(dtype)[..., None] * (2 * math.pi / (min_period * (max_period / min_period) ** fraction))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def masked_mean_states(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean [B, d] float32 of hidden states [B, P, d] over the tokens in a mask [B, P]."""
    weights = mask.to(torch.float32)[..., None]
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)


def chunk_mask(prefix_mask: Tensor, evaluations: int, actions: int, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention among R evaluations of a chunk in one sequence, in which they do not see each other.

    Args:
        prefix_mask: [B, P] bool.
        evaluations: R.
        actions: C, of a chunk.
        causal: whether an action attends to earlier ones alone.

    Returns:
        Positions in the chunk [R * C], and the mask [B, 1, R * C, P + R * C].
    """
    device = prefix_mask.device
    step = torch.arange(actions, device=device).repeat(evaluations)
    which = torch.arange(evaluations, device=device).repeat_interleave(actions)
    visible = which[:, None] == which
    if causal:
        visible = visible & (step[:, None] >= step)
    to_prefix = prefix_mask[:, None, None].expand(-1, 1, len(step), -1)
    return step, torch.cat([to_prefix, visible.expand(len(prefix_mask), 1, -1, -1)], dim=-1)


class Scope(nn.Module):
    """Modules under their names in a checkpoint."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class GroupedQueryAttention(nn.Module):
    """Attention to keys and values that the caller puts together; tensor names are transformers'.

    Args:
        width: of the residual stream.
        heads: of the queries.
        kv_heads: of keys and values.
        head_dim: width of a head.
        bias: whether the projections have biases.
        kv_width: width of the input of the key and value projections; None: `width`.
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
            keys: [B, kv_heads, M, head_dim], already rotated.
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


def normalize(norm: nn.Module, hidden: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Normalized vectors, and the gate of an adaptive norm; None without a condition."""
    return (norm(hidden), None) if condition is None else norm(hidden, condition)


class FlowDecoderLayer(nn.Module):
    """Pre-norm decoder layer under transformers' tensor names.

    Args:
        attention: of the layer.
        mlp: of the layer.
        norm: factory of its norms; an adaptive norm takes a condition and also returns a gate.
    """

    def __init__(self, attention: GroupedQueryAttention, mlp: nn.Module, norm: Callable[[], nn.Module]):
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def before_attention(self, hidden: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[..., width] -> normalized, and the gate for `after_attention`."""
        return normalize(self.input_layernorm, hidden, condition)

    def after_attention(
        self, hidden: Tensor, attended: Tensor, gate: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        """Add the attention's output and the MLP's to the residual stream [..., width]."""
        hidden = hidden + (attended if gate is None else attended * gate)
        normed, gate = normalize(self.post_attention_layernorm, hidden, condition)
        added: Tensor = self.mlp(normed)
        return hidden + (added if gate is None else added * gate)


class FlowDecoder(nn.Module):
    """Decoder layers, their final norm and the token embedding, if any, under transformers' tensor names."""

    embed_tokens: nn.Embedding

    def __init__(self, layers: Iterable[FlowDecoderLayer], norm: nn.Module, embedding: nn.Embedding | None = None):
        super().__init__()
        if embedding is not None:
            self.embed_tokens = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    @property
    def stack(self) -> list[FlowDecoderLayer]:
        """The layers."""
        return cast("list[FlowDecoderLayer]", list(self.layers))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.stack[0].self_attn.q_proj.weight.dtype

    def encode(
        self,
        hidden: Tensor,
        *,
        at: Rotation,
        mask: Tensor,
        count: int | None = None,
        before: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Run the layers over tokens [B, L, d]; of the last one only keys and values.

        Args:
            hidden: embeddings.
            at: positions.
            mask: of the keys, those `before` included.
            count: number of layers; None: all.
            before: keys and values of earlier tokens, for each layer.

        Returns:
            Keys and values of each layer, those `before` included, and the hidden states that enter the last one.
        """
        all_keys, all_values, layers = [], [], self.stack[:count]
        for index, layer in enumerate(layers):
            normed, _ = layer.before_attention(hidden)
            keys, values = layer.self_attn.keys_values(normed, normed)
            keys = rotate(keys, at)
            if before is not None:
                keys = torch.cat([before[0][index].to(keys.dtype), keys], dim=2)
                values = torch.cat([before[1][index].to(values.dtype), values], dim=2)
            all_keys.append(keys)
            all_values.append(values)
            if index + 1 < len(layers):
                hidden = layer.after_attention(hidden, layer.self_attn(normed, keys, values, at=at, mask=mask))
        return all_keys, all_values, hidden


class FlowNetwork(nn.Module):
    """A vision-language model that encodes observations, and an action expert that reads its keys and values.

    t runs from 1 (noise) to 0 (action), and the velocity is the direction from action to noise.

    Attributes:
        config: of the policy.
        prefix_width: of `Prefix.pooled`.
        expert_width: of `expert_states`.
        last_vlm_layer: index of the last layer of the vision-language model that the expert reads.
        model: the whole network, under LeRobot's names.
        vlm: prefix of the names of the vision-language model's parameters.
        language: that of its decoder's.
        vision: that of its vision tower's.
        pooled_parts: parts (see `part_of`) on which `Prefix.pooled` depends.
    """

    vlm: ClassVar[str]
    language: ClassVar[str]
    vision: ClassVar[str]
    pooled_parts: ClassVar[tuple[str, ...]] = ("vision", "language")

    config: LeRobotConfig
    prefix_width: int
    expert_width: int
    last_vlm_layer: int
    model: Scope

    @property
    def expert(self) -> FlowDecoder:
        """The decoder of the action expert."""
        raise NotImplementedError

    def prefix(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor) -> Prefix:
        """Encode observations; frozen parts stay out of the graph. Padding and masked images change nothing.

        Args:
            images: [B, N, 3, H, W] in [-1, 1], from `LeRobotFiles.pixels`.
            image_mask: [B, N] bool, False for a missing camera.
            tokens: [B, L] int64, padded on the right.
            token_mask: [B, L] bool.
            state: [B, max_state_dim] float32, normalized and padded; not read if the prompt contains the state.
        """
        raise NotImplementedError

    def expert_states(self, prefix: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """The expert's last hidden states [B, R, C, width]; arguments as in `velocity`.

        The R evaluations of a decision are one sequence, in which they do not see each other.
        """
        raise NotImplementedError

    def velocity(self, prefix: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """Velocities of noisy actions.

        Args:
            prefix: of B decisions.
            x: [B, R, C, max_action_dim], R evaluations for each of them.
            t: [B, R], in (0, 1].

        Returns:
            [B, R, C, max_action_dim] float32.
        """
        return self.velocity_of(self.expert_states(prefix, x, t))

    def velocity_of(self, states: Tensor) -> Tensor:
        """Velocities [..., max_action_dim] float32, from `expert_states`."""
        velocity: Tensor = self.model.action_out_proj(states.to(self.model.action_out_proj.weight.dtype))
        return velocity.float()

    def embed_actions(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Projected noisy actions [B, R, C, width], and the embeddings of their times [B, R, 1, width]."""
        dtype = self.model.action_in_proj.weight.dtype
        actions = self.model.action_in_proj(x.to(dtype))
        times = time_embedding(t, actions.shape[-1], self.config.min_period, self.config.max_period).to(dtype)
        return actions, times[:, :, None]

    def fuse_time(self, actions: Tensor, times: Tensor) -> Tensor:
        """Tokens of the expert [B, R, C, width], from `embed_actions`."""
        both = torch.cat([actions, times.expand_as(actions)], dim=-1)
        fused: Tensor = self.model.action_time_mlp_out(F.silu(self.model.action_time_mlp_in(both)))
        return fused.to(self.expert.dtype)

    def part_of(self, name: str) -> str:
        """The part with a parameter: "vision", "language", "state", "expert", "output"; "" if nothing reads it."""
        if not name.startswith(self.vlm):
            named = {"state_proj": "state", "action_out_proj": "output"}
            return named.get(name.removeprefix("model.").partition(".")[0], "expert")
        if name.startswith((f"{self.vlm}lm_head.", f"{self.language}norm.")):
            return ""
        if not name.startswith(self.language):
            return "vision"
        layer, rest = self._vlm_layer(name)
        read = ("input_layernorm.", "self_attn.k_proj.", "self_attn.v_proj.")
        unread = layer > self.last_vlm_layer or (layer == self.last_vlm_layer and not rest.startswith(read))
        return "" if unread else "language"

    def _vlm_layer(self, name: str) -> tuple[int, str]:
        """Index of the decoder layer with a parameter, -1 for embeddings, and the rest of its name."""
        layers = f"{self.language}layers."
        if not name.startswith(layers):
            return -1, ""
        layer, _, rest = name.removeprefix(layers).partition(".")
        return int(layer), rest

    def feeds(self, name: str, features: str) -> bool:
        """Whether `Prefix.pooled` (features "prefix") or `expert_states` ("expert") depend on a parameter."""
        part = self.part_of(name)
        if features == "expert":
            return part not in ("", "output")
        return part in self.pooled_parts and self._vlm_layer(name)[0] < self.last_vlm_layer

    def set_trainable(
        self, *, train_expert_only: bool | None = None, freeze_vision_encoder: bool | None = None
    ) -> None:
        """Select the parameters that get gradients, among those that are read; None: the setting of config.json.

        Args:
            train_expert_only: freeze the vision-language model.
            freeze_vision_encoder: freeze its vision tower.
        """
        expert_only = self.config.train_expert_only if train_expert_only is None else train_expert_only
        no_vision = self.config.freeze_vision_encoder if freeze_vision_encoder is None else freeze_vision_encoder
        for name, parameter in self.named_parameters():
            frozen = not self.part_of(name) or (expert_only and name.startswith(self.vlm))
            frozen |= no_vision and name.startswith(self.vision)
            parameter.requires_grad_(not frozen)

"""The network of SmolVLA: what it sees is encoded once (`prefix`) and read by every denoising step (`velocity`)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlvla.models.lerobot.layers import Rotation, rotate, rotation, time_embedding
from rlvla.models.lerobot.prefix import Prefix
from rlvla.models.smolvla.config import ExpertLayer, SmolVLAConfig, expert_layers
from rlvla.models.smolvla.layers import Decoder, DecoderLayer
from rlvla.models.smolvla.vision import Connector, VisionTower
from rlvla.models.smolvla.vlm import VlmConfig

VLM = "model.vlm_with_expert.vlm."
_PARTS = {"state_proj": "state", "action_out_proj": "output"}


class Vlm(nn.Module):
    """Vision tower, connector and decoder of SmolVLM, and the head for words, which is never used."""

    def __init__(self, vlm: VlmConfig, layers: int, *, shifted_positions: bool = False):
        super().__init__()
        self.model = nn.Module()
        self.model.vision_model = VisionTower(vlm, shifted=shifted_positions)
        self.model.connector = Connector(vlm)
        decoder = [DecoderLayer(vlm.text) for _ in range(layers)]
        self.model.text_model = Decoder(decoder, vlm.text, vocabulary=vlm.vocabulary)
        self.lm_head = nn.Linear(vlm.text.width, vlm.vocabulary, bias=False)


class SmolVLANetwork(nn.Module):
    """SmolVLA's two towers; names and shapes of the tensors are those of LeRobot's files.

    t runs from 1 (noise) to 0 (action), and the velocity is the direction from action to noise.

    Args:
        config: of the policy.
        vlm: sizes of its vision-language model.
        shifted_positions: positions of image patches as in LeRobot 0.4.4; see `PatchEmbeddings`.

    Raises:
        ConfigError: numbers of layers that do not fit together.
    """

    def __init__(self, config: SmolVLAConfig, vlm: VlmConfig, *, shifted_positions: bool = False):
        super().__init__()
        self.config, self.vlm_config = config, vlm
        count = min(config.num_vlm_layers, vlm.layers) if config.num_vlm_layers > 0 else vlm.layers
        self.plan: tuple[ExpertLayer, ...] = expert_layers(config, count)
        self.expert_sizes = vlm.text.expert(config.expert_width_multiplier)
        self.prefix_width, self.expert_width = vlm.text.width, self.expert_sizes.width
        width, kv_width = self.expert_sizes.width, vlm.text.kv_heads * vlm.text.head_dim
        layers = [DecoderLayer(self.expert_sizes, None if at.attends_to_actions else kv_width) for at in self.plan]
        towers = nn.Module()
        towers.vlm = Vlm(vlm, count, shifted_positions=shifted_positions)
        towers.lm_expert = Decoder(layers, self.expert_sizes)
        self.model = nn.Module()
        self.model.vlm_with_expert = towers
        self.model.state_proj = nn.Linear(config.max_state_dim, vlm.text.width)
        self.model.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.model.action_out_proj = nn.Linear(width, config.max_action_dim)
        self.model.action_time_mlp_in = nn.Linear(2 * width, width)
        self.model.action_time_mlp_out = nn.Linear(width, width)

    @property
    def _vlm(self) -> nn.Module:
        return self.model.vlm_with_expert.vlm.model

    @property
    def _expert(self) -> Decoder:
        expert: Decoder = self.model.vlm_with_expert.lm_expert
        return expert

    @property
    def last_vlm_layer(self) -> int:
        """Index of the last layer of the vision-language model that the expert reads."""
        return self.plan[-1].vlm_layer

    def part_of(self, name: str) -> str:
        """What a parameter belongs to: "vision", "language", "state", "expert", "output"; "" if nothing reads it."""
        if not name.startswith(VLM):
            return _PARTS.get(name.removeprefix("model.").partition(".")[0], "expert")
        part = name.removeprefix(VLM)
        if part.startswith(("lm_head.", "model.text_model.norm.")):
            return ""
        if not part.startswith("model.text_model."):
            return "vision"
        layer, rest = self._vlm_layer(name)
        read = ("input_layernorm.", "self_attn.k_proj.", "self_attn.v_proj.")
        unread = layer > self.last_vlm_layer or (layer == self.last_vlm_layer and not rest.startswith(read))
        return "" if unread else "language"

    def _vlm_layer(self, name: str) -> tuple[int, str]:
        """Index of the decoder layer that a parameter belongs to, -1 for embeddings, and the rest of its name."""
        layers = f"{VLM}model.text_model.layers."
        if not name.startswith(layers):
            return -1, ""
        layer, _, rest = name.removeprefix(layers).partition(".")
        return int(layer), rest

    def unused(self, name: str) -> bool:
        """Whether the output does not depend on a parameter: it gets no gradient."""
        return not self.part_of(name)

    def feeds(self, name: str, features: str) -> bool:
        """Whether `Prefix.pooled` (features "prefix") or `expert_states` ("expert") depend on a parameter."""
        part = self.part_of(name)
        if features == "expert":
            return part not in ("", "output")
        return part in ("vision", "language", "state") and self._vlm_layer(name)[0] < self.last_vlm_layer

    def set_trainable(
        self,
        *,
        train_expert_only: bool | None = None,
        freeze_vision_encoder: bool | None = None,
        train_state_proj: bool | None = None,
    ) -> None:
        """Choose which parameters get gradients; None takes the setting of config.json.

        Args:
            train_expert_only: freeze the vision-language model.
            freeze_vision_encoder: freeze its vision tower.
            train_state_proj: train the projection of the state. With a frozen vision-language model only the state's
                token is then kept in the graph.
        """
        given = {
            "train_expert_only": train_expert_only,
            "freeze_vision_encoder": freeze_vision_encoder,
            "train_state_proj": train_state_proj,
        }
        choice = {name: getattr(self.config, name) if value is None else value for name, value in given.items()}
        for name, parameter in self.named_parameters():
            frozen = self.unused(name) or (choice["train_expert_only"] and name.startswith(VLM))
            frozen |= choice["freeze_vision_encoder"] and name.startswith(f"{VLM}model.vision_model.")
            frozen |= not choice["train_state_proj"] and name.startswith("model.state_proj.")
            parameter.requires_grad_(not frozen)

    def prefix(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor) -> Prefix:
        """Encode observations. Padding, and images that are masked, change nothing.

        Args:
            images: [B, N, 3, H, W] in [-1, 1], after resizing.
            image_mask: [B, N] bool, False for a missing camera.
            tokens: [B, L] int64, padded on the right.
            token_mask: [B, L] bool.
            state: [B, max_state_dim], normalized and padded.
        """
        seen, seen_mask = self._embed(images, image_mask, tokens, token_mask)
        state_proj = self.model.state_proj
        state = state_proj(state.to(state_proj.weight.dtype))[:, None].to(seen.dtype)
        keys, values, mask, pooled = self._encode(seen, seen_mask, state)
        own_keys, own_values = [], []
        for at, layer in zip(self.plan, self._expert.layers):
            key, value = keys[at.vlm_layer], values[at.vlm_layer]
            if not at.attends_to_actions:
                weight = layer.self_attn.k_proj.weight
                flat = (part.transpose(1, 2).flatten(2).to(weight.dtype) for part in (key, value))
                key, value = layer.self_attn.keys_values(*flat)
            own_keys.append(key)
            own_values.append(value)
        return Prefix(tuple(own_keys), tuple(own_values), mask, mask.sum(dim=1), pooled)

    def _embed(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Image and language tokens [B, P - 1, d], and their mask."""
        count = images.shape[1]
        seen = self._vlm.connector(self._vlm.vision_model(images.flatten(0, 1)))
        patches = seen.shape[1]
        words = self._vlm.text_model.embed_tokens(tokens)
        seen = torch.cat([seen.unflatten(0, (-1, count)).flatten(1, 2).to(words.dtype), words], dim=1)
        mask = torch.cat([image_mask.repeat_interleave(patches, dim=1), token_mask], dim=1)
        return seen * math.sqrt(seen.shape[-1]), mask

    def _encode(
        self, seen: Tensor, seen_mask: Tensor, state: Tensor
    ) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """Keys and values of every layer that is read, the mask, and the pooled hidden states.

        Images and words do not attend to the state. Padded queries attend like others, to keep clear of rows without
        any key; nothing reads what they compute.
        """
        mask = torch.cat([seen_mask, seen_mask.new_ones(len(seen_mask), 1)], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        turn = rotation(positions, self.vlm_config.text.head_dim)
        if torch.is_grad_enabled() and state.requires_grad and not seen.requires_grad and not self._vlm_trains():
            # Only the state's token depends on what is trained: keep it alone in the graph.
            first, second = (tuple(part[..., s, :] for part in turn) for s in (slice(None, -1), slice(-1, None)))
            keys, values, hidden = self._layers(seen, first, seen_mask[:, None, None])
            keys, values, last = self._layers(state, second, mask[:, None, None], (keys, values))
            hidden = torch.cat([hidden, last], dim=1)
        else:
            allowed = mask[:, None, None].expand(-1, 1, mask.shape[1], -1).clone()
            allowed[:, :, :-1, -1] = False
            keys, values, hidden = self._layers(torch.cat([seen, state], dim=1), turn, allowed)
        weights = mask.to(torch.float32)[..., None]
        pooled = (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)
        return keys, values, mask, pooled

    def _vlm_trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self._vlm.parameters())

    def _layers(
        self,
        hidden: Tensor,
        turn: Rotation,
        mask: Tensor,
        before: tuple[list[Tensor], list[Tensor]] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Run the vision-language model's layers, of the last one only keys and values, over [B, L, d].

        Args:
            hidden: embeddings.
            turn: positions.
            mask: of the keys, those `before` included.
            before: keys and values of earlier tokens, for each layer.

        Returns:
            Keys and values of each layer, those `before` included, and the hidden states that enter the last one.
        """
        all_keys, all_values = [], []
        for index, layer in enumerate(self._vlm.text_model.layers[: self.last_vlm_layer + 1]):
            normed = layer.input_layernorm(hidden)
            keys, values = layer.self_attn.keys_values(normed, normed)
            keys = rotate(keys, turn)
            if before is not None:
                keys = torch.cat([before[0][index], keys], dim=2)
                values = torch.cat([before[1][index], values], dim=2)
            all_keys.append(keys)
            all_values.append(values)
            if index < self.last_vlm_layer:
                hidden = layer.after_attention(hidden, layer.self_attn(normed, keys, values, at=turn, mask=mask))
        return all_keys, all_values, hidden

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

    def expert_states(self, prefix: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """The expert's last hidden states [B, R, C, width]; arguments as in `velocity`.

        The R evaluations of a decision are one sequence, in which they do not see each other.
        """
        evaluations, actions = x.shape[1:3]
        hidden = self._embed_actions(x, t).flatten(1, 2)
        step = torch.arange(actions, device=x.device).repeat(evaluations)
        head_dim = self.vlm_config.text.head_dim
        after_prefix = rotation(prefix.length[:, None] + step, head_dim)
        from_zero = rotation(step[None], head_dim)
        to_prefix = prefix.mask[:, None, None]
        which = torch.arange(evaluations, device=x.device).repeat_interleave(actions)
        causal = (which[:, None] == which) & (step[:, None] >= step)
        both = torch.cat(
            [
                to_prefix.expand(-1, 1, len(step), -1),
                causal.expand(len(x), 1, -1, -1),
            ],
            dim=-1,
        )
        for at, layer, keys, values in zip(self.plan, self._expert.layers, prefix.keys, prefix.values):
            normed = layer.input_layernorm(hidden)
            if at.attends_to_actions:
                own_keys, own_values = layer.self_attn.keys_values(normed, normed)
                keys = torch.cat([keys.to(own_keys.dtype), rotate(own_keys, after_prefix)], dim=2)
                values = torch.cat([values.to(own_values.dtype), own_values], dim=2)
                attended = layer.self_attn(normed, keys, values, at=after_prefix, mask=both)
            else:
                attended = layer.self_attn(normed, keys, values, at=from_zero, mask=to_prefix)
            hidden = layer.after_attention(hidden, attended)
        states: Tensor = self._expert.norm(hidden)
        return states.unflatten(1, (evaluations, actions))

    def _embed_actions(self, x: Tensor, t: Tensor) -> Tensor:
        """Noisy actions and times -> [B, R, C, width]."""
        dtype = self.model.action_in_proj.weight.dtype
        actions = self.model.action_in_proj(x.to(dtype))
        config = self.config
        times = time_embedding(t, actions.shape[-1], config.min_period, config.max_period).to(dtype)
        both = torch.cat([actions, times[:, :, None].expand_as(actions)], dim=-1)
        embedded: Tensor = self.model.action_time_mlp_out(F.silu(self.model.action_time_mlp_in(both)))
        return embedded.to(self._expert.layers[0].self_attn.q_proj.weight.dtype)

"""The network of pi0 and pi0.5: what it sees is encoded once (`prefix`), and denoising steps read that (`velocity`)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlvla.models.lerobot.layers import rotate, rotation, time_embedding
from rlvla.models.lerobot.prefix import Prefix
from rlvla.models.pi0.config import Pi0Config
from rlvla.models.pi0.layers import Decoder, VisionTower
from rlvla.models.pi0.sizes import Sizes

VLM = "model.paligemma_with_expert.paligemma."
_LANGUAGE = f"{VLM}model.language_model."
_PARTS = {"state_proj": "state", "action_out_proj": "output"}


class Pi0Network(nn.Module):
    """The two towers of pi0 or pi0.5; names and shapes of the tensors are those of LeRobot's files.

    t runs from 1 (noise) to 0 (action), and the velocity is the direction from action to noise. The heads for words,
    which are never used, are left out.

    Args:
        config: of the policy.
        sizes: of its parts.
    """

    def __init__(self, config: Pi0Config, sizes: Sizes):
        super().__init__()
        self.config, self.sizes = config, sizes
        self.prefix_width, self.expert_width = sizes.vlm.width, sizes.expert.width
        paligemma, expert, towers, inner = nn.Module(), nn.Module(), nn.Module(), nn.Module()
        inner.vision_tower = nn.Module()
        inner.vision_tower.vision_model = VisionTower(sizes.vision, config.image_size)
        inner.multi_modal_projector = nn.Module()
        inner.multi_modal_projector.linear = nn.Linear(sizes.vision.width, sizes.vlm.width)
        inner.language_model = Decoder(sizes.vlm, vocabulary=sizes.vocabulary)
        paligemma.model = inner
        expert.model = Decoder(sizes.expert, adaptive=config.state_in_prompt)
        towers.paligemma, towers.gemma_expert = paligemma, expert
        width = sizes.expert.width
        self.model = nn.Module()
        self.model.paligemma_with_expert = towers
        self.model.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.model.action_out_proj = nn.Linear(width, config.max_action_dim)
        if config.state_in_prompt:
            self.model.time_mlp_in = nn.Linear(width, width)
            self.model.time_mlp_out = nn.Linear(width, width)
        else:
            self.model.state_proj = nn.Linear(config.max_state_dim, width)
            self.model.action_time_mlp_in = nn.Linear(2 * width, width)
            self.model.action_time_mlp_out = nn.Linear(width, width)

    @property
    def _vlm(self) -> nn.Module:
        return self.model.paligemma_with_expert.paligemma.model

    @property
    def _expert(self) -> Decoder:
        expert: Decoder = self.model.paligemma_with_expert.gemma_expert.model
        return expert

    def part_of(self, name: str) -> str:
        """What a parameter belongs to: "vision", "language", "state", "expert", "output"; "" if nothing reads it."""
        if not name.startswith(VLM):
            return _PARTS.get(name.removeprefix("model.").partition(".")[0], "expert")
        if not name.startswith(_LANGUAGE):
            return "vision"
        layer, rest = self._vlm_layer(name)
        read = ("input_layernorm.", "self_attn.k_proj.", "self_attn.v_proj.")
        last = layer == self.sizes.vlm.depth - 1 and not rest.startswith(read)
        return "" if last or name.startswith(f"{_LANGUAGE}norm.") else "language"

    def _vlm_layer(self, name: str) -> tuple[int, str]:
        """Index of the decoder layer that a parameter belongs to, -1 for others, and the rest of its name."""
        if not name.startswith(f"{_LANGUAGE}layers."):
            return -1, ""
        layer, _, rest = name.removeprefix(f"{_LANGUAGE}layers.").partition(".")
        return int(layer), rest

    def feeds(self, name: str, features: str) -> bool:
        """Whether `Prefix.pooled` (features "prefix") or `expert_states` ("expert") depend on a parameter."""
        part = self.part_of(name)
        if features == "expert":
            return part not in ("", "output")
        return part in ("vision", "language") and self._vlm_layer(name)[0] < self.sizes.vlm.depth - 1

    def set_trainable(
        self, *, train_expert_only: bool | None = None, freeze_vision_encoder: bool | None = None
    ) -> None:
        """Choose which parameters get gradients; None takes the setting of config.json.

        Args:
            train_expert_only: freeze the vision-language model.
            freeze_vision_encoder: freeze its vision tower.
        """
        expert_only = self.config.train_expert_only if train_expert_only is None else train_expert_only
        no_vision = self.config.freeze_vision_encoder if freeze_vision_encoder is None else freeze_vision_encoder
        for name, parameter in self.named_parameters():
            frozen = not self.part_of(name) or (expert_only and name.startswith(VLM))
            frozen |= no_vision and name.startswith(f"{VLM}model.vision_tower.")
            parameter.requires_grad_(not frozen)

    def prefix(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor) -> Prefix:
        """Encode observations; parts that are frozen stay out of the graph.

        Padding, and images that are masked, change nothing. In pi0 the last token is the state's: the expert computes
        its keys and values, which are the same for all noisy actions, because it does not see them.

        Args:
            images: [B, N, 3, H, W] in [-1, 1], after resizing.
            image_mask: [B, N] bool, False for a missing camera.
            tokens: [B, L] int64, padded on the right.
            token_mask: [B, L] bool.
            state: [B, max_state_dim], normalized and padded; pi0.5 does not read it, as its prompt has the state.
        """
        prefix = self._encode(images, image_mask, tokens, token_mask)
        return prefix if self.config.state_in_prompt else self._with_state(prefix, state)

    def _encode(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor) -> Prefix:
        """Keys and values of images and words, which all see each other.

        Padded queries attend like others, to keep clear of rows without any key; nothing reads what they compute.
        """
        decoder = self._vlm.language_model
        patches = self._vlm.vision_tower.vision_model(images.flatten(0, 1))
        seen = self._vlm.multi_modal_projector.linear(patches).unflatten(0, images.shape[:2])
        words = decoder.embed_tokens(tokens) * math.sqrt(self.sizes.vlm.width)
        hidden = torch.cat([seen.flatten(1, 2).to(words.dtype), words], dim=1)
        mask = torch.cat([image_mask.repeat_interleave(patches.shape[1], dim=1), token_mask], dim=1)
        turn = rotation((mask.cumsum(dim=1) - 1).clamp(min=0), self.sizes.vlm.head_dim)
        all_keys, all_values = [], []
        for index, layer in enumerate(decoder.layers):
            normed, _ = layer.before_attention(hidden)
            keys, values = layer.self_attn.keys_values(normed, normed)
            all_keys.append(rotate(keys, turn))
            all_values.append(values)
            if index + 1 < len(decoder.layers):  # nothing reads what the last layer makes of them
                attended = layer.self_attn(normed, all_keys[-1], values, at=turn, mask=mask[:, None, None])
                hidden = layer.after_attention(hidden, attended)
        weights = mask.to(torch.float32)[..., None]
        pooled = (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)
        return Prefix(tuple(all_keys), tuple(all_values), mask, mask.sum(dim=1), pooled)

    def _with_state(self, prefix: Prefix, state: Tensor) -> Prefix:
        """Append the state's token, which sees the prefix and itself."""
        state_proj = self.model.state_proj
        hidden = state_proj(state.to(state_proj.weight.dtype))[:, None].to(self._dtype)
        turn = rotation(prefix.length[:, None], self.sizes.expert.head_dim)
        mask = torch.cat([prefix.mask, prefix.mask.new_ones(len(state), 1)], dim=1)
        all_keys, all_values = [], []
        for index, layer in enumerate(self._expert.layers):
            normed, _ = layer.before_attention(hidden)
            keys, values = layer.self_attn.keys_values(normed, normed)
            all_keys.append(torch.cat([prefix.keys[index].to(keys.dtype), rotate(keys, turn)], dim=2))
            all_values.append(torch.cat([prefix.values[index].to(values.dtype), values], dim=2))
            if index + 1 < len(self._expert.layers):
                attended = layer.self_attn(normed, all_keys[-1], all_values[-1], at=turn, mask=mask[:, None, None])
                hidden = layer.after_attention(hidden, attended)
        return Prefix(tuple(all_keys), tuple(all_values), mask, prefix.length + 1, prefix.pooled)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._expert.layers[0].self_attn.q_proj.weight.dtype
        return dtype

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

        The R evaluations of a decision are one sequence, in which they do not see each other; the actions of one
        evaluation all do.
        """
        evaluations, actions = x.shape[1:3]
        hidden, condition = self._embed_actions(x, t)
        step = torch.arange(actions, device=x.device).repeat(evaluations)
        turn = rotation(prefix.length[:, None] + step, self.sizes.expert.head_dim)
        which = torch.arange(evaluations, device=x.device).repeat_interleave(actions)
        same = (which[:, None] == which).expand(len(x), 1, -1, -1)
        mask = torch.cat([prefix.mask[:, None, None].expand(-1, 1, len(step), -1), same], dim=-1)
        for layer, keys, values in zip(self._expert.layers, prefix.keys, prefix.values):
            normed, gate = layer.before_attention(hidden, condition)
            normed = normed.flatten(1, 2)
            own_keys, own_values = layer.self_attn.keys_values(normed, normed)
            keys = torch.cat([keys.to(own_keys.dtype), rotate(own_keys, turn)], dim=2)
            values = torch.cat([values.to(own_values.dtype), own_values], dim=2)
            attended = layer.self_attn(normed, keys, values, at=turn, mask=mask)
            hidden = layer.after_attention(hidden, attended.view_as(hidden), gate, condition)
        return self._expert.final(hidden, condition)

    def _embed_actions(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Noisy actions and times -> [B, R, C, width], and for pi0.5 the condition of the norms [B, R, 1, width]."""
        dtype = self.model.action_in_proj.weight.dtype
        actions = self.model.action_in_proj(x.to(dtype))
        config = self.config
        times = time_embedding(t, actions.shape[-1], config.min_period, config.max_period).to(dtype)[:, :, None]
        if config.state_in_prompt:
            condition = F.silu(self.model.time_mlp_out(F.silu(self.model.time_mlp_in(times))))
            return actions.to(self._dtype), condition
        both = torch.cat([actions, times.expand_as(actions)], dim=-1)
        embedded = self.model.action_time_mlp_out(F.silu(self.model.action_time_mlp_in(both)))
        return embedded.to(self._dtype), None

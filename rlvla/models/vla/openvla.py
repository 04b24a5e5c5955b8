"""OpenVLA with parallel decoding of an action chunk (OpenVLA-OFT): towers, projector and decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlvla.models.vla.checkpoint import CheckpointFolder, load_folder, save_folder
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.decoder import build_language_model, decode_bidirectional, rotary_tables
from rlvla.models.vla.vision import VisionBackbone


class Projector(nn.Module):
    """Three linear layers with GELU between, from image features to the width of the decoder."""

    def __init__(self, vision_dim: int, llm_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, llm_dim)
        self.fc3 = nn.Linear(llm_dim, llm_dim)

    def forward(self, features: Tensor) -> Tensor:
        """[B, patches, vision_dim] -> [B, patches, llm_dim]."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(features)))))


class ProprioProjector(nn.Module):
    """Two linear layers with GELU between, from the normalised proprio vector to one token."""

    def __init__(self, proprio_dim: int, llm_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, llm_dim)
        self.fc2 = nn.Linear(llm_dim, llm_dim)

    def forward(self, proprio: Tensor) -> Tensor:
        """[B, P] -> [B, llm_dim]."""
        return self.fc2(F.gelu(self.fc1(proprio)))


class OpenVLAForActionPrediction(nn.Module):
    """The OFT variant of OpenVLA: one forward pass gives the logits of a whole chunk of discrete actions.

    Sequence of the decoder: [BOS][patches][proprio?][rest of the prompt][A*D placeholders][</s>][padding].
    Placeholders are zero vectors, attention is bidirectional, only padding is masked. The next-token shift of language
    models is kept: the logits of action token t are read one position before its placeholder, so the first ones come
    from the last prompt token.

    Columns of the logits: column k is token id `vocab_size - 256 + k` (31744 + k for the Llama-2 vocabulary) and, since
    ids fall as actions rise, column k decodes to bin centre `255 - k` (see `ActionTokenizer`).

    Tensors that take no part in the computation (last vision blocks, final vision norms, pooling head) are kept and
    saved, and need no gradient.

    Attributes:
        config: the `OpenVLAConfig`.
        dataset_statistics: statistics by key as in `dataset_statistics.json`; may be replaced before saving.
        folder: what else the checkpoint folder held (tokenizer files, preprocessor settings), for `save_pretrained`.
    """

    def __init__(self, config: OpenVLAConfig):
        super().__init__()
        self.config = config
        llm_dim = config.text_config.hidden_size
        self.vision_backbone = VisionBackbone(*config.tower_configs())
        self.projector = Projector(self.vision_backbone.output_dim, llm_dim)
        self.proprio_projector = ProprioProjector(config.proprio_dim, llm_dim) if config.use_proprio else None
        first_row = config.base_vocab_size - config.n_action_bins
        self.language_model = build_language_model(config.text_config, first_row, config.n_action_bins)
        self.dataset_statistics: dict[str, Any] = dict(config.norm_stats or {})
        self.folder: CheckpointFolder | None = None
        self.gradient_checkpointing = False
        self._rotary: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        **overrides: Any,
    ) -> OpenVLAForActionPrediction:
        """Load a checkpoint folder in the public format.

        Args:
            folder: holds config.json, safetensors (single or sharded with an index) and dataset statistics.
            dtype: type of the parameters; None keeps the types of the file.
            device: where the parameters go.
            **overrides: settings that replace or complete those of config.json (`OpenVLAConfig`).

        Raises:
            ConfigError: the folder is not an OpenVLA checkpoint, or tensors are missing, unexpected or of another shape
                (all of them listed).
        """
        return load_folder(cls, folder, dtype=dtype, device=device, overrides=overrides)

    def save_pretrained(self, folder: str | Path, *, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write a folder in the public format, with every tensor, the statistics and the tokenizer files.

        Args:
            folder: created if absent.
            state_dict: the tensors to write instead of the module's own (gathered from shards, for example).
        """
        save_folder(self, folder, state_dict=state_dict)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.language_model.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the parameters."""
        return self.language_model.lm_head.weight.dtype

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute activations of towers and decoder in the backward pass while training.

        Args:
            gradient_checkpointing_kwargs: accepted for callers of the Hugging Face interface; `use_reentrant=True` is
                refused because frozen inputs would lose their gradient.
        """
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("use_reentrant=True is not supported; leave it out")
        self._set_gradient_checkpointing(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self._set_gradient_checkpointing(False)

    def _set_gradient_checkpointing(self, value: bool) -> None:
        self.gradient_checkpointing = value
        self.vision_backbone.featurizer.gradient_checkpointing = value
        self.vision_backbone.fused_featurizer.gradient_checkpointing = value

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor, proprio: Tensor | None = None
    ) -> Tensor:
        """The same as `action_logits`, so that an engine may wrap the module."""
        hidden = self.action_hidden_states(input_ids, attention_mask, pixel_values, proprio)
        return self.language_model.lm_head(hidden)

    def action_logits(
        self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor, proprio: Tensor | None = None
    ) -> Tensor:
        """Logits [B, A*D, n_action_bins] of the action tokens, order (action, dimension).

        Args:
            input_ids: [B, L] prompts, left-padded, beginning with BOS.
            attention_mask: [B, L], 1 on real tokens.
            pixel_values: float [B, 6N, H, W] from `to_pixel_values`.
            proprio: float [B, P], normalised to [-1, 1]; required exactly when the model uses proprio.
        """
        return self.forward(input_ids, attention_mask, pixel_values, proprio)

    def action_hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor, proprio: Tensor | None = None
    ) -> Tensor:
        """Hidden states [B, A*D, d_llm] after the final norm from which the logits of each action token come.

        Arguments as in `action_logits`.
        """
        patches = self.projector(self.vision_features(pixel_values))
        num_padding, num_real = self._padding(attention_mask)
        embeddings = self._embed(input_ids, num_padding, num_real, patches, proprio)
        length, num_actions = embeddings.shape[1], self.config.num_action_tokens
        num_visual = length - input_ids.shape[1] - num_actions - 1
        if num_padding is None:
            start = num_visual + input_ids.shape[1] - 1
            mask, read = None, slice(start, start + num_actions)
        else:
            positions = torch.arange(length, device=embeddings.device)
            mask = (positions < length - num_padding)[:, None, None]
            read = (num_visual - 1 + num_real) + positions[:num_actions]
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        rotary = self._rotary_tables(length, embeddings.device, embeddings.dtype)
        return decode_bidirectional(self.language_model, embeddings, mask, read, rotary, recompute=recompute)

    def vision_features(self, pixel_values: Tensor) -> Tensor:
        """Features of both towers [B, N * patches, d_vision] of `pixel_values` [B, 6N, H, W].

        Raises:
            ValueError: the number of channels or the image size contradicts the configuration.
        """
        config, (channels, height, width) = self.config, pixel_values.shape[1:]
        wanted = config.num_images_in_input
        if channels % 6 or (wanted is not None and channels != 6 * wanted):
            raise ValueError(
                f"pixel_values have {channels} channels; this model takes {wanted or 'N'} image(s) of 6 channels each"
            )
        if (height, width) != (config.image_size, config.image_size):
            raise ValueError(
                f"pixel_values are {height}x{width}; this model takes {config.image_size}x{config.image_size}"
            )
        return self.vision_backbone(pixel_values.to(self.dtype))

    def _padding(self, attention_mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Padding and real tokens of each prompt, [B, 1] each, or (None, None) when no prompt is padded."""
        if bool(attention_mask.all()):
            return None, None
        if not bool(attention_mask[:, -1].all()):
            raise ValueError("attention_mask ends with padding; prompts must be padded on the left and not be empty")
        num_real = attention_mask.sum(1, keepdim=True)
        return attention_mask.shape[1] - num_real, num_real

    def _embed(
        self,
        input_ids: Tensor,
        num_padding: Tensor | None,
        num_real: Tensor | None,
        patches: Tensor,
        proprio: Tensor | None,
    ) -> Tensor:
        """Decoder input [B, S, d]: padding moved behind the end token, placeholders zero."""
        batch, prompt_length = input_ids.shape
        num_actions = self.config.num_action_tokens
        eos = self.config.text_config.eos_token_id
        tail = input_ids.new_full((batch, 1), eos)
        if num_padding is None:
            text = self.language_model.model.embed_tokens(torch.cat([input_ids, tail], 1))
            zeros = text.new_zeros(batch, num_actions, text.shape[-1])
            parts = [text[:, 1:prompt_length], zeros, text[:, prompt_length:]]
        else:
            # Position j of the tail: prompt tokens, then the placeholders, then the end token, then padding.
            position = torch.arange(prompt_length + num_actions + 1, device=input_ids.device)[None]
            source = position + num_padding
            source = torch.where(position >= num_real + num_actions, source - num_actions, source)
            source = torch.where(position > num_real + num_actions, prompt_length + 1, source)
            is_placeholder = (position >= num_real) & (position < num_real + num_actions)
            padding = input_ids.new_full((batch, 1), self.config.pad_token_id)
            ids = torch.cat([input_ids, tail, padding], 1).gather(1, source.masked_fill(is_placeholder, prompt_length))
            text = self.language_model.model.embed_tokens(ids).masked_fill(is_placeholder[..., None], 0.0)
            parts = [text[:, 1:]]
        visual = [patches] if self.proprio_projector is None else [patches, self._proprio_token(proprio)]
        return torch.cat([text[:, :1], *visual, *parts], dim=1)

    def _proprio_token(self, proprio: Tensor | None) -> Tensor:
        if proprio is None or proprio.shape[-1] != self.config.proprio_dim:
            shape = None if proprio is None else list(proprio.shape)
            raise ValueError(f"this model takes proprio of shape [B, {self.config.proprio_dim}], got {shape}")
        return self.proprio_projector(proprio.to(self.dtype))[:, None]

    def _rotary_tables(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = (length, device, dtype)
        if key not in self._rotary:
            # Tables made in inference mode could not be used in a later training pass.
            with torch.inference_mode(False):
                self._rotary[key] = rotary_tables(self.config.text_config, length, device, dtype)
        return self._rotary[key]

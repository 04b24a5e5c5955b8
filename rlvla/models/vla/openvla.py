"""OpenVLA and OpenVLA-OFT: towers, projector and decoder, with both ways of decoding actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from rlvla.models.vla.attention import Attention, require_flash_attention
from rlvla.models.vla.checkpoint import CheckpointFolder, load_folder
from rlvla.models.vla.checkpoint_writing import save_folder
from rlvla.models.vla.choices import ATTENTION_IMPLEMENTATIONS
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.decoder import LayerCache, build_language_model, decode, decode_next, rotary_tables
from rlvla.models.vla.sequence import arrange
from rlvla.models.vla.vision import VisionBackbone
from rlvla.utils.errors import ConfigError


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


# What the Auto classes of transformers hand on: where to look for files, which here lie in the folder.
_OF_AUTO_CLASSES = {"_from_auto", "adapter_kwargs", "trust_remote_code", "code_revision", "revision", "_commit_hash"}


@dataclass(frozen=True)
class DecoderInput:
    """What the decoder reads.

    Attributes:
        embeddings: [B, S, d].
        lengths: [B] real positions; None when nothing is padded.
        read: positions from which the action tokens are predicted, a slice or [B, R].
    """

    embeddings: Tensor
    lengths: Tensor | None
    read: Tensor | slice


class OpenVLAForActionPrediction(nn.Module):
    """OpenVLA in its two variants.

    "oft": one forward pass gives the logits of a whole chunk of discrete actions. Sequence of the decoder:
    [BOS][patches][proprio?][rest of the prompt][A*D placeholders][</s>][padding]. Placeholders are zero vectors,
    attention is bidirectional, only padding is masked. The next-token shift of language models is kept: the logits of
    action token t are read one position before its placeholder, so the first ones come from the last prompt token.

    "autoregressive": the tokens of one action follow each other, [BOS][patches][prompt][token 0][token 1]...[padding],
    with causal attention. `act_step_by_step` decodes them with a key-value cache; the other methods take them as given.

    Columns of the logits: column k is token id `vocab_size - 256 + k` (31744 + k for the Llama-2 vocabulary) and, since
    ids fall as actions rise, column k decodes to bin centre `255 - k` (see `ActionTokenizer`).

    Tensors that take no part in the computation (last vision blocks, final vision norms, pooling head) are kept and
    saved, and need no gradient.

    Attributes:
        config: the `OpenVLAConfig`.
        dataset_statistics: statistics by key as in `dataset_statistics.json`; may be replaced before saving.
        folder: what else the checkpoint folder held (tokenizer files, preprocessor settings), for `save_pretrained`.
    """

    config_class = OpenVLAConfig  # for the Auto classes of transformers

    def __init__(self, config: OpenVLAConfig):
        super().__init__()
        self.config = config
        llm_dim = config.text_config.hidden_size
        self.vision_backbone = VisionBackbone(*config.tower_configs())
        self.projector = Projector(self.vision_backbone.output_dim, llm_dim)
        self.proprio_projector = ProprioProjector(config.proprio_dim, llm_dim) if config.use_proprio else None
        self.language_model = build_language_model(config.text_config, self.first_action_id, config.n_action_bins)
        self.dataset_statistics: dict[str, Any] = dict(config.norm_stats or {})
        self.folder: CheckpointFolder | None = None
        self.gradient_checkpointing = False
        self.attn_implementation = ATTENTION_IMPLEMENTATIONS[0]
        self._rotary: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        config: OpenVLAConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device = "cpu",
        attn_implementation: str | None = None,
        **overrides: Any,
    ) -> OpenVLAForActionPrediction:
        """Load a checkpoint folder in the public format.

        Args:
            folder: holds config.json, safetensors (single or sharded with an index) and dataset statistics, perhaps the
                separate files of OFT; or a LoRA adapter with its base model named.
            config: accepted for the Auto classes of transformers; the folder's own settings count.
            dtype: type of the parameters (or its name); None keeps the types of the file.
            device: where the parameters go.
            attn_implementation: see `set_attention`.
            **overrides: settings that replace or complete those of config.json (`OpenVLAConfig`), and `platform`, one
                of `PLATFORMS`.

        Raises:
            ConfigError: the folder is not an OpenVLA checkpoint, or tensors are missing, unexpected or of another shape
                (all of them listed).
        """
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype)
        overrides = {name: value for name, value in overrides.items() if name not in _OF_AUTO_CLASSES}
        model = load_folder(cls, folder, dtype=dtype, device=device, overrides=overrides)
        if attn_implementation is not None:
            model.set_attention(attn_implementation)
        return model

    def save_pretrained(self, folder: str | Path, *, state_dict: Any = None) -> None:
        """Write a folder in the public format, with every tensor, the statistics and the tokenizer files.

        Args:
            folder: created if absent.
            state_dict: a mapping of the tensors to write instead of the module's own (gathered from shards, or merged
                one by one when asked for).
        """
        save_folder(self, folder, state_dict=state_dict)

    @property
    def first_action_id(self) -> int:
        """Token id of logits column 0."""
        return self.config.base_vocab_size - self.config.n_action_bins

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.language_model.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the decoder's parameters."""
        return self.language_model.lm_head.weight.dtype

    def set_attention(self, implementation: str) -> None:
        """Choose the decoder's attention kernel: "sdpa" or "flash_attention_2".

        Raises:
            ConfigError: an unknown one, or flash-attn is not installed.
        """
        if implementation not in ATTENTION_IMPLEMENTATIONS:
            known = list(ATTENTION_IMPLEMENTATIONS)
            raise ConfigError(f"attn_implementation {implementation!r} is unknown; use one of {known}")
        if implementation == "flash_attention_2":
            require_flash_attention()
        self.attn_implementation = implementation

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

    # ----------------------------------------------------------------- whole sequences
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        action_ids: Tensor | None = None,
    ) -> Tensor:
        """The same as `action_logits`, so that an engine may wrap the module."""
        if self.config.is_autoregressive and action_ids is None:
            return self.act_step_by_step(input_ids, attention_mask, pixel_values, proprio)
        hidden = self.action_hidden_states(input_ids, attention_mask, pixel_values, proprio, action_ids)
        return self.language_model.lm_head(hidden)

    def action_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        action_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, A*D, n_action_bins] of the action tokens, order (action, dimension).

        Args:
            input_ids: [B, L] prompts, left-padded, beginning with BOS.
            attention_mask: [B, L], 1 on real tokens.
            pixel_values: float [B, 6N, H, W] from `to_pixel_values`.
            proprio: float [B, P], normalised to [-1, 1]; required exactly when the model uses proprio.
            action_ids: [B, D] token ids. In the autoregressive variant each token sees those before it; without them
                the logits are those along greedy decoding. The oft variant takes no notice of them.
        """
        return self.forward(input_ids, attention_mask, pixel_values, proprio, action_ids)

    def action_hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        action_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, A*D, d_llm] after the final norm from which the logits of each action token come.

        Arguments as in `action_logits`; the autoregressive variant needs the tokens.

        Raises:
            ValueError: inputs that contradict the configuration or each other.
        """
        inputs = self._decoder_input(input_ids, attention_mask, pixel_values, proprio, action_ids)
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        attention = Attention(self.config.is_autoregressive, inputs.lengths, self.attn_implementation)
        rotary = self._rotary_tables(inputs.embeddings.shape[1], inputs.embeddings)
        return decode(self.language_model, inputs.embeddings, attention, inputs.read, rotary, recompute=recompute)

    @torch.no_grad()
    def act_step_by_step(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        choose: Callable[[Tensor, int], Tensor] | None = None,
    ) -> Tensor:
        """Decode the tokens of one action with a key-value cache; image and prompt pass through the decoder once.

        Args:
            input_ids: as in `action_logits`, like the next three.
            attention_mask: as there.
            pixel_values: as there.
            proprio: as there.
            choose: (logits [B, n_action_bins], step) -> columns [B] of the next token; None takes the likeliest.

        Returns:
            The logits [B, D, n_action_bins] that each choice was made from.
        """
        steps = self.config.num_action_tokens
        none = input_ids.new_empty(len(input_ids), 1)  # the first token is predicted from the prompt alone
        inputs = self._decoder_input(input_ids, attention_mask, pixel_values, proprio, none)
        batch, length = inputs.embeddings.shape[:2]
        rotary = self._rotary_tables(length + steps - 1, inputs.embeddings)
        caches = [LayerCache(steps - 1) for _ in self.language_model.model.layers]
        attention = Attention(True, inputs.lengths, self.attn_implementation)
        tables = rotary[0][:length], rotary[1][:length]
        hidden = decode(self.language_model, inputs.embeddings, attention, inputs.read, tables, caches=caches)
        read = inputs.read
        positions = torch.full((batch, 1), read.start, device=self.device) if isinstance(read, slice) else read
        logits = []
        for step in range(steps):
            logits.append(self.language_model.lm_head(hidden[:, 0]))
            columns = logits[-1].argmax(-1) if choose is None else choose(logits[-1], step)
            if step == steps - 1:
                break
            token = self.language_model.model.embed_tokens(columns[:, None] + self.first_action_id)
            positions = positions + 1
            hidden = decode_next(self.language_model, token, positions, rotary, caches, self.attn_implementation)
        return torch.stack(logits, 1)

    # --------------------------------------------------------------------------- parts
    def vision_features(self, pixel_values: Tensor, language: Tensor | None = None) -> Tensor:
        """Features of both towers [B, N * patches, d_vision].

        Args:
            pixel_values: [B, 6N, H, W].
            language: [B, d_llm] mean language embedding; required exactly when the model uses FiLM.

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
        if (language is not None) != bool(config.use_film):
            raise ValueError("the mean language embedding is needed by a model with FiLM, and by no other")
        dtype = self.vision_backbone.dtype  # a separate file may hold the towers in another type than the decoder's
        language = None if language is None else language.to(dtype)
        return self.vision_backbone(pixel_values.to(dtype), language).to(self.dtype)

    def _decoder_input(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor,
        proprio: Tensor | None,
        action_ids: Tensor | None,
    ) -> DecoderInput:
        text = arrange(input_ids, attention_mask, self._tail(input_ids, action_ids), self.config.pad_token_id)
        embedded = self.language_model.model.embed_tokens(text.ids)
        actions, num_actions = None, self.config.num_action_tokens
        if not self.config.is_autoregressive:
            actions = text.tail_mask(0, num_actions)
            embedded = embedded.masked_fill(actions[..., None], 0.0)
        language = text.mean_embedding(embedded, actions) if self.config.use_film else None
        visual = [self.projector(self.vision_features(pixel_values, language))]
        if self.proprio_projector is not None:
            visual.append(self._proprio_token(proprio))
        num_visual = sum(part.shape[1] for part in visual)
        count = num_actions if actions is not None else text.tail_length + 1
        return DecoderInput(
            torch.cat([embedded[:, :1], *visual, embedded[:, 1:]], dim=1),
            text.lengths(num_visual),
            text.read_positions(num_visual, count),
        )

    def _tail(self, input_ids: Tensor, action_ids: Tensor | None) -> Tensor:
        """What follows the prompt: placeholders and the end token, or the action tokens but for the last."""
        batch = len(input_ids)
        if self.config.is_autoregressive:
            if action_ids is None:
                raise ValueError("the autoregressive variant needs the action tokens: each depends on those before it")
            return action_ids[:, :-1].to(input_ids)
        placeholders = input_ids.new_full((batch, self.config.num_action_tokens), self.config.pad_token_id)
        end = input_ids.new_full((batch, 1), self.config.text_config.eos_token_id)
        return torch.cat([placeholders, end], 1)

    def _proprio_token(self, proprio: Tensor | None) -> Tensor:
        if proprio is None or proprio.shape[-1] != self.config.proprio_dim:
            shape = None if proprio is None else list(proprio.shape)
            raise ValueError(f"this model takes proprio of shape [B, {self.config.proprio_dim}], got {shape}")
        assert self.proprio_projector is not None
        projected = self.proprio_projector(proprio.to(self.proprio_projector.fc1.weight.dtype))
        return projected[:, None].to(self.dtype)

    def _rotary_tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        key = (length, like.device, like.dtype)
        if key not in self._rotary:
            # Tables made in inference mode could not be used in a later training pass.
            with torch.inference_mode(False):
                self._rotary[key] = rotary_tables(self.config.text_config, length, like.device, like.dtype)
        return self._rotary[key]


# `AutoModel.from_pretrained(folder)` then needs no code from the folder.
AutoConfig.register("openvla", OpenVLAConfig, exist_ok=True)
AutoModel.register(OpenVLAConfig, OpenVLAForActionPrediction, exist_ok=True)

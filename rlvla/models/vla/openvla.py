"""OpenVLA and OpenVLA-OFT: towers, projector and decoder, with parallel and autoregressive decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from rlvla.models.config import ActorConfig
from rlvla.models.vla.checkpoint import CheckpointFolder, load_folder, save_folder
from rlvla.models.vla.choices import ATTENTION_IMPLEMENTATIONS
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.decoder import (
    Attention,
    LayerCache,
    build_language_model,
    decode,
    decode_next,
    require_flash_attention,
    rotary_tables,
)
from rlvla.models.vla.regression_head import ActionStd, RegressionHead
from rlvla.models.vla.vision import VisionBackbone
from rlvla.utils.errors import ConfigError


class Projector(nn.Module):
    """Three linear layers with GELU in between, from image features to the width of the decoder."""

    def __init__(self, vision_dim: int, llm_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, llm_dim)
        self.fc3 = nn.Linear(llm_dim, llm_dim)

    def forward(self, features: Tensor) -> Tensor:
        """[B, patches, vision_dim] -> [B, patches, llm_dim]."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(features)))))


class ProprioProjector(nn.Module):
    """Two linear layers with GELU in between, from the normalized proprio vector to one token."""

    def __init__(self, proprio_dim: int, llm_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, llm_dim)
        self.fc2 = nn.Linear(llm_dim, llm_dim)

    def forward(self, proprio: Tensor) -> Tensor:
        """[B, P] -> [B, llm_dim]."""
        return self.fc2(F.gelu(self.fc1(proprio)))


# Arguments by which the Auto classes of transformers locate files; all files are in the folder.
_OF_AUTO_CLASSES = {"_from_auto", "adapter_kwargs", "trust_remote_code", "code_revision", "revision", "_commit_hash"}


@dataclass(frozen=True)
class DecoderInput:
    """Input of the decoder.

    Attributes:
        embeddings: [B, S, d].
        lengths: [B] number of real positions; None if nothing is padded.
        read: positions that predict the action tokens, a slice or [B, R].
    """

    embeddings: Tensor
    lengths: Tensor | None
    read: Tensor | slice


class OpenVLAForActionPrediction(nn.Module):
    """OpenVLA in its three variants.

    "oft": one forward pass gives the logits of a chunk of discrete actions. Decoder sequence:
    `[BOS][patches][proprio?][rest of the prompt][A*D placeholders][</s>][padding]`. Placeholders are zero vectors,
    attention is bidirectional, only padding is masked. With the next-token shift of language models the logits of
    action token t are read one position before its placeholder, the first at the last prompt token.

    "autoregressive": causal attention over `[BOS][patches][prompt][token 0][token 1]...[padding]`, one action.
    `act_step_by_step` decodes the tokens with a key-value cache; other methods take them as input.

    "oft_regression": as "oft", but `RegressionHead` and `ActionStd` map the hidden states to mean and standard
    deviation; there are no logits.

    Column k of the logits is token id `vocab_size - 256 + k` (31744 + k for the Llama-2 vocabulary). Ids decrease as
    actions increase, so column k decodes to bin center `255 - k` (see `ActionTokenizer`).

    Tensors unused in the forward pass (last vision blocks, final vision norms, pooling head) are saved, too; they have
    no gradient.

    Attributes:
        config: the `OpenVLAConfig`.
        dataset_statistics: statistics by key, as in `dataset_statistics.json`; may be replaced before saving.
        folder: other contents of the checkpoint folder (tokenizer files, preprocessor settings), for `save_pretrained`.
    """

    config_class = OpenVLAConfig  # for the Auto classes of transformers

    def __init__(self, config: OpenVLAConfig):
        super().__init__()
        self.config = config
        llm_dim = config.text_config.hidden_size
        self.vision_backbone = VisionBackbone(*config.tower_configs())
        self.projector = Projector(self.vision_backbone.output_dim, llm_dim)
        self.proprio_projector = ProprioProjector(config.proprio_width, llm_dim) if config.use_proprio else None
        self.language_model = build_language_model(config.text_config, self.first_action_id, config.n_action_bins)
        self.action_head: RegressionHead | None = None
        self.action_std: ActionStd | None = None
        if config.has_regression_head:
            self.action_head = RegressionHead(llm_dim, config.action_dim)
            self.action_std = ActionStd(config.action_std, llm_dim, config.action_dim, config.action_std_init)
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
            folder: contains config.json, safetensors (one file, or shards with an index), dataset statistics and
                optionally OFT's separate files; or a LoRA adapter that names its base model.
            config: ignored; accepted for the Auto classes of transformers.
            dtype: dtype of the parameters (or its name); None keeps the dtypes of the files.
            device: device of the parameters.
            attn_implementation: see `set_attention`.
            **overrides: settings that override config.json (`OpenVLAConfig`), and `platform`, one of `PLATFORMS`.

        Raises:
            ConfigError: the folder is not an OpenVLA checkpoint, or tensors are missing, unexpected or of the wrong
                shape (all are listed).
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

        `state_dict` replaces the module's tensors (gathered from shards, or merged one by one on access).
        """
        save_folder(self, folder, state_dict=state_dict)

    @property
    def first_action_id(self) -> int:
        """Token id of logits column 0."""
        return self.config.base_vocab_size - self.config.n_action_bins

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.language_model.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoder's parameters."""
        return self.language_model.model.embed_tokens.weight.dtype

    def configure(self, config: ActorConfig) -> None:
        """Set the attention kernel, gradient checkpointing and frozen vision towers; adds no adapters.

        Raises:
            ConfigError: as in `set_attention`.
        """
        self.set_attention(config.attn_implementation)
        if config.gradient_checkpointing:
            self.gradient_checkpointing_enable()
        if config.freeze_vision_backbone:
            self.vision_backbone.requires_grad_(False)

    def set_attention(self, implementation: str) -> None:
        """Choose the decoder's attention kernel: "sdpa" or "flash_attention_2".

        Raises:
            ConfigError: the kernel is unknown, or flash-attn is not installed.
        """
        if implementation not in ATTENTION_IMPLEMENTATIONS:
            names = list(ATTENTION_IMPLEMENTATIONS)
            raise ConfigError(f"attn_implementation {implementation!r} is unknown; use one of {names}")
        if implementation == "flash_attention_2":
            require_flash_attention()
        self.attn_implementation = implementation

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute activations of towers and decoder in the backward pass during training.

        Args:
            gradient_checkpointing_kwargs: accepted for callers of the Hugging Face interface; `use_reentrant=True` is
                rejected because with frozen inputs the gradients would be lost.
        """
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("use_reentrant=True is not supported; leave it out")
        for module in (self, self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer):
            module.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Store activations again instead of recomputing them."""
        for module in (self, self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer):
            module.gradient_checkpointing = False

    # ----------------------------------------------------------------- whole sequences
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        action_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`read_out` of `action_hidden_states`, in one pass of a training engine; arguments as in `action_logits`."""
        if self.config.is_autoregressive and action_ids is None:
            return self.act_step_by_step(input_ids, attention_mask, pixel_values, proprio)
        return self.read_out(self.action_hidden_states(input_ids, attention_mask, pixel_values, proprio, action_ids))

    def read_out(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the action head to `action_hidden_states` [B, A*D, d].

        Returns:
            Logits [B, A*D, n_action_bins]; with a regression head, the mean [B, A, D] of the normalized actions and the
            logarithm of their standard deviation, [D] or [B, A, D].
        """
        if self.action_head is None or self.action_std is None:
            return self.language_model.lm_head(hidden)
        return self.action_head(hidden), self.action_std(hidden)

    def action_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        action_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, A*D, n_action_bins] of the action tokens, in (action, dimension) order.

        Args:
            input_ids: [B, L] prompts, left-padded, starting with BOS.
            attention_mask: [B, L], 1 on real tokens; None if no prompt is padded.
            pixel_values: float [B, 6N, H, W] from `to_pixel_values`.
            proprio: float [B, P], normalized to [-1, 1]; required if the model uses proprio.
            action_ids: [B, D] token ids. In the autoregressive variant each token attends to those before it; without
                them, the logits are those of greedy decoding. The oft variant ignores them.
        """
        logits = self.forward(input_ids, attention_mask, pixel_values, proprio, action_ids)
        assert isinstance(logits, Tensor), "a regression head has no logits"
        return logits

    def action_hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        action_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, A*D, d_llm] after the final norm, one per action token.

        Arguments as in `action_logits`; the autoregressive variant requires `action_ids`.

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
        attention_mask: Tensor | None,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
        choose: Callable[[Tensor, int], Tensor] | None = None,
    ) -> Tensor:
        """Decode the tokens of one action with a key-value cache; images and prompt pass through the decoder once.

        Other arguments as in `action_logits`; `choose`: (logits [B, n_action_bins], step) -> columns [B] of the next
        token, None takes the argmax. Returns the logits [B, D, n_action_bins] of all steps.
        """
        steps = self.config.num_action_tokens
        inputs = self.prompt_embeddings(input_ids, attention_mask, pixel_values, proprio)
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

    def prompt_embeddings(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        pixel_values: Tensor,
        proprio: Tensor | None = None,
    ) -> DecoderInput:
        """Decoder input before the first token of the autoregressive variant; arguments as in `action_logits`."""
        none = input_ids.new_empty(len(input_ids), 1)  # the first token is predicted from the prompt alone
        return self._decoder_input(input_ids, attention_mask, pixel_values, proprio, none)

    # --------------------------------------------------------------------------- parts
    def vision_features(self, pixel_values: Tensor, language: Tensor | None = None) -> Tensor:
        """Features of both towers [B, N * patches, d_vision].

        Args:
            pixel_values: [B, 6N, H, W].
            language: [B, d_llm] mean language embedding; required if the model uses FiLM, else None.

        Raises:
            ValueError: the number of channels or the image size contradicts the configuration, or `language` is missing
                or unexpected.
        """
        config, (channels, height, width) = self.config, pixel_values.shape[1:]
        images = config.num_images_in_input
        if channels % 6 or (images is not None and channels != 6 * images):
            raise ValueError(
                f"pixel_values have {channels} channels; this model takes {images or 'N'} image(s) of 6 channels each"
            )
        if (height, width) != (config.image_size, config.image_size):
            raise ValueError(
                f"pixel_values are {height}x{width}; this model takes {config.image_size}x{config.image_size}"
            )
        if (language is not None) != bool(config.use_film):
            raise ValueError("the mean language embedding is for models with FiLM, which require it")
        dtype = self.vision_backbone.dtype  # towers from a separate file may have a different dtype than the decoder
        language = None if language is None else language.to(dtype)
        return self.vision_backbone(pixel_values.to(dtype), language).to(self.dtype)

    def _decoder_input(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
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
        """Tokens after the prompt: placeholders and the end token, or all action tokens but the last."""
        batch = len(input_ids)
        if self.config.is_autoregressive:
            if action_ids is None:
                raise ValueError("the autoregressive variant needs the action tokens: each depends on those before it")
            return action_ids[:, :-1].to(input_ids)
        placeholders = input_ids.new_full((batch, self.config.num_action_tokens), self.config.pad_token_id)
        eos: Any = self.config.text_config.eos_token_id
        end = input_ids.new_full((batch, 1), eos)
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
            # Tables created in inference mode cannot be used in a later training pass.
            with torch.inference_mode(False):
                self._rotary[key] = rotary_tables(self.config.text_config, length, like.device, like.dtype)
        return self._rotary[key]


# So that `AutoModel.from_pretrained(folder)` needs no code from the folder.
AutoConfig.register("openvla", OpenVLAConfig, exist_ok=True)
AutoModel.register(OpenVLAConfig, OpenVLAForActionPrediction, exist_ok=True)


@dataclass(frozen=True)
class Text:
    """Token ids of a batch without images: prompt, then tail, then padding.

    Attributes:
        ids: [B, L + K] int64; the real tokens of each row come first.
        num_real: [B, 1] number of real prompt tokens; None if no prompt is padded (then all L are real).
        prompt_length: L, length of the padded prompts.
        tail_length: K, number of tokens after the prompt.
    """

    ids: Tensor
    num_real: Tensor | None
    prompt_length: int
    tail_length: int

    def tail_mask(self, start: int, stop: int) -> Tensor:
        """Bool [B or 1, L + K]: positions `start` to `stop` (exclusive) of the tail."""
        position = torch.arange(self.ids.shape[1], device=self.ids.device)[None]
        offset = position - (self.prompt_length if self.num_real is None else self.num_real)
        return (offset >= start) & (offset < stop)

    def read_positions(self, num_visual: int, count: int) -> Tensor | slice:
        """Positions that predict `count` tokens after the prompt: a slice if equal for all rows, else [B, count]."""
        if self.num_real is None:
            start = num_visual + self.prompt_length - 1
            return slice(start, start + count)
        return (num_visual - 1 + self.num_real) + torch.arange(count, device=self.ids.device)

    def lengths(self, num_visual: int) -> Tensor | None:
        """[B] number of real positions in the whole sequence; None if nothing is padded."""
        return None if self.num_real is None else self.num_real[:, 0] + (num_visual + self.tail_length)

    def mean_embedding(self, embeddings: Tensor, without: Tensor | None) -> Tensor:
        """[B, d]: mean of embeddings [B, L + K, d] over the real tokens, excluding the mask `without`."""
        counted = self.tail_mask(-self.ids.shape[1], self.tail_length)
        if without is not None:
            counted = counted & ~without
        weight = counted.to(embeddings.dtype)[..., None]
        return (embeddings * weight).sum(1) / weight.sum(1)


def arrange(input_ids: Tensor, attention_mask: Tensor | None, tail: Tensor, pad_token_id: int) -> Text:
    """Append `tail` [B, K] to left-padded prompts [B, L] and move the padding to the end.

    Raises:
        ValueError: a prompt is empty or padded on the right. A mask on an accelerator is not checked, because that
            would wait for it.
    """
    joined = torch.cat([input_ids, tail], 1)
    length, tail_length = input_ids.shape[1], tail.shape[1]
    on_host = attention_mask is not None and attention_mask.device.type == "cpu"
    if attention_mask is None or (on_host and bool(attention_mask.all())):
        return Text(joined, None, length, tail_length)
    if on_host and not bool(attention_mask[:, -1].all()):
        raise ValueError("attention_mask ends with padding; prompts must be padded on the left and not be empty")
    num_real = attention_mask.sum(1, keepdim=True)
    padding = joined.new_full((len(joined), 1), pad_token_id)
    source = torch.arange(joined.shape[1], device=joined.device)[None] + (length - num_real)
    ids = torch.cat([joined, padding], 1).gather(1, source.clamp_max(joined.shape[1]))
    return Text(ids, num_real, length, tail_length)

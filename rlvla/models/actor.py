"""The policy: a VLA whose action tokens are sampled, scored and trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rlvla.experience import Experience
from rlvla.models.backbone import prepare_backbone
from rlvla.models.config import ActorConfig
from rlvla.models.inputs import VLAInputs
from rlvla.models.lora import MergedWeights, add_adapters, lora_layers, save_adapter
from rlvla.models.vla.checkpoint_files import ADAPTER_FOLDER
from rlvla.models.vla.openvla import OpenVLAForActionPrediction


@dataclass
class ActionBatch:
    """A batch of decisions on the host.

    Attributes:
        tokens: [B, T] int64, columns 0..255.
        log_probs: [B, T] float32.
        actions: [B, A, D] float32, un-normalised: what the environment executes.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    actions: np.ndarray


class Actor(nn.Module):
    """A VLA policy over discrete action tokens.

    Log-probabilities and entropies are taken over the 256 action columns at the sampling temperature, for sampling,
    old log-probs and updates alike.

    Args:
        vla: the architecture with its weights.
        inputs: how observations become model inputs.
        config: LoRA and memory options.
    """

    def __init__(self, vla: OpenVLAForActionPrediction, inputs: VLAInputs, config: ActorConfig | None = None):
        super().__init__()
        self.inputs = inputs
        self.config = config or ActorConfig()
        prepare_backbone(vla, self.config)
        if self.config.lora_rank:
            targets = lora_layers(vla, self.config.lora_targets, vision=not self.config.freeze_vision_backbone)
            vla = add_adapters(vla, targets, self.config.lora_rank, self.config.lora_alpha)
        self.vla = vla

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: ActorConfig | None = None,
        unnorm_key: str | None = None,
        **overrides: Any,
    ) -> Actor:
        """Load a checkpoint folder in the public format.

        Args:
            path: config.json, safetensors, tokenizer, dataset_statistics.json.
            config: LoRA and memory options.
            unnorm_key: which entry of the dataset statistics to use; needed only where there are several.
            **overrides: settings that replace or complete those of config.json, e.g. `center_crop`, `model_variant`,
                `platform`; or `dtype` and `device`, see `OpenVLAForActionPrediction.from_pretrained`.

        Raises:
            ConfigError: a missing or foreign file, wrong tensors, or unknown statistics key.
        """
        vla = OpenVLAForActionPrediction.from_pretrained(path, **overrides)
        return cls(vla, VLAInputs.from_pretrained(path, config=vla.config, unnorm_key=unnorm_key), config)

    @property
    def tokens_per_decision(self) -> int:
        """T."""
        return self.inputs.config.action_chunk_len * self.inputs.config.action_dim

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        images: torch.Tensor,
        proprio: torch.Tensor | None,
        action_tokens: torch.Tensor,
        temperature: float = 1.0,
        all_columns: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """Score given tokens.

        Args:
            input_ids: [B, L] int64 left-padded prompt.
            attention_mask: [B, L].
            images: [B, N, H, W, 3] uint8.
            proprio: [B, P] float32 as the environment gave it, or None.
            action_tokens: [B, T] int64, columns 0..255.
            temperature: divides the logits.
            all_columns: return the log-probabilities of all 256 columns instead.

        Returns:
            log-probabilities [B, T] and entropies [B, T] (nats), or log-probabilities [B, T, 256]; float32.
        """
        pixels, proprio = self.inputs.pixels_and_proprio(images, proprio, next(self.parameters()).dtype)
        ids = self.inputs.processor.action_tokenizer.columns_to_ids(action_tokens)
        logits = self.vla(input_ids, attention_mask, pixels, proprio, ids).float()  # [B, T, 256]
        return self.log_probs_of(logits, action_tokens, temperature, all_columns)

    @staticmethod
    def log_probs_of(
        logits: torch.Tensor, action_tokens: torch.Tensor, temperature: float, all_columns: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """What `forward` returns, from logits [B, T, 256]."""
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        if all_columns:
            return log_probs
        chosen = log_probs.gather(-1, action_tokens.unsqueeze(-1)).squeeze(-1)
        return chosen, -(log_probs.exp() * log_probs).sum(-1)

    def score(self, batch: Experience, temperature: float) -> dict[str, object]:
        """Keyword arguments of `forward` for a batch of decisions, on the model's device."""
        return {**self.inputs.to_device(batch, next(self.parameters()).device), "temperature": temperature}

    @torch.inference_mode()
    def act(
        self,
        images: np.ndarray,
        proprio: np.ndarray | None,
        instructions: Sequence[str],
        *,
        uniforms: np.ndarray | None,
        temperature: float = 1.0,
    ) -> ActionBatch:
        """Decide.

        Args:
            images: [B, N, H, W, 3] uint8.
            proprio: [B, P] float32, or None.
            instructions: B sentences.
            uniforms: [B, T] in [0, 1), one random number per token (inverse-CDF sampling); None is greedy.
            temperature: divides the logits; log-probs are at this temperature also when greedy.
        """
        weight = next(self.parameters())
        device = weight.device
        prompt = self.inputs.prompt(instructions, device)
        state = None if proprio is None else torch.from_numpy(proprio).to(device)
        pixels, state = self.inputs.pixels_and_proprio(torch.from_numpy(images).to(device), state, weight.dtype)
        draws = None if uniforms is None else torch.from_numpy(uniforms).to(device)
        chosen: list[torch.Tensor] = []

        def choose(logits: torch.Tensor, step: int) -> torch.Tensor:
            """Columns [B] of one token."""
            drawn = None if draws is None else draws[:, step : step + 1]
            chosen.append(pick_tokens(logits[:, None].float(), temperature, drawn)[:, 0])
            return chosen[-1]

        if self.inputs.config.is_autoregressive:
            logits = self.vla.act_step_by_step(*prompt, pixels, state, choose).float()
            tokens = torch.stack(chosen, 1)
        else:
            logits = self.vla(*prompt, pixels, state).float()
            tokens = pick_tokens(logits, temperature, draws)
        log_probs = torch.log_softmax(logits / temperature, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        columns = tokens.cpu().numpy()
        return ActionBatch(columns, log_probs.cpu().numpy(), self.inputs.decode_actions(columns))

    def forget_action_heads(self) -> None:
        """Leave regression heads behind when saving: they do not belong to weights that are trained on tokens."""
        if self.base.folder is not None:
            self.base.folder.action_heads.clear()

    @property
    def base(self) -> OpenVLAForActionPrediction:
        """The architecture, without the wrapper of its adapters."""
        return self.vla.get_base_model() if self.config.lora_rank else self.vla

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """For the time of the block the policy is the one its adapters were put on; without adapters, an error."""
        if not self.config.lora_rank:
            raise ValueError("this policy has no adapters that could be disabled")
        with self.vla.disable_adapter():
            yield

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the policy in the public format.

        LoRA adapters are merged into the written weights, one tensor at a time, and also written by themselves into
        `lora_adapter/`, in peft's format.

        Args:
            folder: created if need be.
            state_dict: whole parameters, where this module holds only shards of them.
        """
        state = self.state_dict() if state_dict is None else state_dict
        state = {name.removeprefix("vla."): tensor for name, tensor in state.items() if name.startswith("vla.")}
        if not self.config.lora_rank:
            self.vla.save_pretrained(folder, state_dict=state)
            return
        adapted = self.base
        with torch.device("meta"):  # the architecture without adapters; the tensors come from `state`
            plain = OpenVLAForActionPrediction(adapted.config)
        plain.folder, plain.dataset_statistics = adapted.folder, adapted.dataset_statistics
        plain.save_pretrained(folder, state_dict=MergedWeights(state, self.config.lora_alpha / self.config.lora_rank))
        save_adapter(Path(folder) / ADAPTER_FOLDER, state, self.vla.peft_config["default"])


def pick_tokens(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor | None) -> torch.Tensor:
    """Columns [B, T] from logits [B, T, K]: the likeliest, or by the uniforms [B, T] at a temperature."""
    if uniforms is None:
        return logits.argmax(-1)
    return sample_by_inverse_cdf(torch.log_softmax(logits / temperature, dim=-1), uniforms)


def sample_by_inverse_cdf(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [B, T] whose cumulative probability first exceeds the uniforms [B, T]; log_probs [B, T, K].

    Unlike torch's own sampler this depends on a row's own random numbers only, not on the batch it is in.
    """
    cumulative = log_probs.double().exp().cumsum(-1)
    # The last column may end below 1 by rounding: scaling keeps every draw inside.
    threshold = uniforms.unsqueeze(-1).double() * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1).clamp_max(log_probs.shape[-1] - 1)

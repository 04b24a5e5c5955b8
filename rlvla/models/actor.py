"""The policy: a VLA whose action tokens are sampled, scored and trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rlvla.experience import Experience
from rlvla.models.inputs import VLAInputs
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.utils.arguments import arg
from rlvla.utils.errors import require


@dataclass(frozen=True)
class ActorConfig:
    """How a policy checkpoint is prepared for training."""

    lora_rank: int = arg(
        0, "rank of LoRA adapters on the language model's linear layers (0: train all weights)", minimum=0
    )
    lora_alpha: int = arg(16, "LoRA scale is lora_alpha / lora_rank", minimum=1)
    gradient_checkpointing: bool = arg(False, "recompute activations of towers and decoder in the backward pass")


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


LORA_TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


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
        if self.config.gradient_checkpointing:
            vla.gradient_checkpointing_enable()
        if self.config.lora_rank:
            peft = require("peft", extra="all")
            lora = peft.LoraConfig(
                r=self.config.lora_rank, lora_alpha=self.config.lora_alpha, target_modules=LORA_TARGETS
            )
            vla = peft.get_peft_model(vla, lora)
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
            **overrides: settings that replace those of config.json, e.g. `center_crop`.

        Raises:
            ConfigError: a missing or foreign file, wrong tensors, or unknown statistics key.
        """
        vla = OpenVLAForActionPrediction.from_pretrained(path, **overrides)
        return cls(vla, VLAInputs.from_pretrained(path, config=vla.config, unnorm_key=unnorm_key), config)

    @property
    def tokens_per_decision(self) -> int:
        """T."""
        return self.inputs.config.action_chunk_len * self.inputs.config.action_dim

    def _logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        images: torch.Tensor,
        proprio: torch.Tensor | None,
    ) -> torch.Tensor:
        dtype = next(self.parameters()).dtype
        pixel_values = self.inputs.pixel_values(images, dtype)
        proprio = None if proprio is None else self.inputs.normalize_proprio(proprio).to(dtype)
        return self.vla(input_ids, attention_mask, pixel_values, proprio).float()  # [B, T, 256]

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
        log_probs = torch.log_softmax(self._logits(input_ids, attention_mask, images, proprio) / temperature, dim=-1)
        if all_columns:
            return log_probs
        chosen = log_probs.gather(-1, action_tokens.unsqueeze(-1)).squeeze(-1)
        return chosen, -(log_probs.exp() * log_probs).sum(-1)

    def score(self, batch: Experience, temperature: float) -> dict[str, object]:
        """Keyword arguments of `forward` for a batch of decisions, on the model's device."""
        device = next(self.parameters()).device
        ids, mask = self.inputs.prompt(batch.instructions, device)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "images": batch.images.to(device),
            "proprio": None if batch.proprio is None else batch.proprio.to(device),
            "action_tokens": batch.action_tokens.to(device),
            "temperature": temperature,
        }

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
        device = next(self.parameters()).device
        ids, mask = self.inputs.prompt(instructions, device)
        logits = self._logits(
            ids,
            mask,
            torch.from_numpy(images).to(device),
            None if proprio is None else torch.from_numpy(proprio).to(device),
        )
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        if uniforms is None:
            tokens = logits.argmax(-1)
        else:
            draws = torch.from_numpy(uniforms).to(device)
            tokens = sample_by_inverse_cdf(log_probs, draws)
        chosen = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        tokens = tokens.cpu().numpy()
        return ActionBatch(tokens, chosen.cpu().numpy(), self.inputs.decode_actions(tokens))

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the policy in the public format; LoRA adapters are merged into the written weights.

        Args:
            folder: created if need be.
            state_dict: whole parameters, where this module holds only shards of them.
        """
        state = self.state_dict() if state_dict is None else state_dict
        state = {name.removeprefix("vla."): tensor for name, tensor in state.items() if name.startswith("vla.")}
        vla = self.vla
        if self.config.lora_rank:
            state = merge_lora(state, self.config.lora_alpha / self.config.lora_rank)
            adapted = self.vla.get_base_model()
            with torch.device("meta"):  # the architecture without adapters; the tensors come from `state`
                vla = OpenVLAForActionPrediction(adapted.config)
            vla.folder, vla.dataset_statistics = adapted.folder, adapted.dataset_statistics
        vla.save_pretrained(folder, state_dict=state)


def sample_by_inverse_cdf(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [B, T] whose cumulative probability first exceeds the uniforms [B, T]; log_probs [B, T, K].

    Unlike torch's own sampler this depends on a row's own random numbers only, not on the batch it is in.
    """
    cumulative = log_probs.double().exp().cumsum(-1)
    # The last column may end below 1 by rounding: scaling keeps every draw inside.
    threshold = uniforms.unsqueeze(-1).double() * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1).clamp_max(log_probs.shape[-1] - 1)


def merge_lora(state: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The base model's tensors with `scale * B A` added (Hu et al. 2021), from a peft state dict."""
    prefix = "base_model.model."
    merged = {}
    for name, tensor in state.items():
        name = name.removeprefix(prefix)
        if ".lora_" in name:
            continue
        if ".base_layer." in name:
            stem = name.replace(".base_layer.weight", "")
            down = state.get(f"{prefix}{stem}.lora_A.default.weight")
            if name.endswith(".base_layer.weight") and down is not None:
                up = state[f"{prefix}{stem}.lora_B.default.weight"]
                tensor = (tensor.float() + scale * up.float() @ down.float()).to(tensor.dtype)
            name = name.replace(".base_layer.", ".")
        merged[name] = tensor
    return merged
